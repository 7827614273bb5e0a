#!/bin/bash
# The CUDA backend on the GPU of this machine: correctness against ref and the CPU backend,
# compute-sanitizer, memory, start, speed, profile. Builds what it runs, or takes what was built
# elsewhere (a machine without libraries or network: all of it needs only a C library).
#   tests/cuda/run.sh [--bin FOLDER] [--out FOLDER] [--seconds N] [--sanitizer PROGRAM]
#                     [--models FOLDER] [--build FOLDER] [step ...]
# --build FOLDER only builds into it; --bin FOLDER takes the programs from there. Every step runs
# even when one before it failed; a step whose tool is not on this machine is skipped and says so,
# as is one that would begin after N seconds. PROGRAM is a compute-sanitizer, 2026.1 or newer for
# racecheck (older ones report the decode kernel's barriers of 512 of 640 threads). --models keeps
# the random checkpoints of the real shape for the next run.
# Results: FOLDER/<step>.log, and one JSON document, FOLDER/cuda.json, with machine, driver and
# commit, and the same as tables in FOLDER/cuda.md. Exit status 1 when a check failed; a
# goal of speed that was missed is only told.
set -u
cd "$(dirname "$0")/../.." || exit 1
all=(doctor mini older real kernels memcheck racecheck synccheck long full memory start bench speed
    sweep ncu)
bin= out=bench/cuda build= seconds=3600 sanitizer=compute-sanitizer models= steps=()
fault() {
    echo "run.sh: $1; see --help" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' tests/cuda/run.sh && echo "Steps: ${all[*]}" && exit ;;
    -*) [ $# -ge 2 ] || fault "$1: no such option, or its value is missing" ;;&
    --bin) bin=$2 && shift 2 ;;
    --out) out=$2 && shift 2 ;;
    --build) build=$2 && shift 2 ;;
    --seconds) seconds=$2 && shift 2 ;;
    --sanitizer) sanitizer=$2 && shift 2 ;;
    --models) models=$2 && shift 2 ;;
    -*) fault "$1: no such option" ;;
    *)
        case " ${all[*]} " in *" $1 "*) ;; *) fault "$1: found no such step, expected ${all[*]}" ;; esac
        steps+=("$1") && shift
        ;;
    esac
done
[ ${#steps[@]} -gt 0 ] || steps=("${all[@]}")

# lily-core, cuda-check, and the kernels' own programs, into a folder.
build_into() {
    local to=$1 nvcc flags
    make -j"$(nproc)" build/release/lily-core build/release/cuda-check || return 1
    mkdir -p "$to"
    cp build/release/lily-core build/release/cuda-check "$to" || return 1
    git describe --always --dirty --abbrev=12 --exclude='*' >"$to/commit"
    strip "$to/lily-core" "$to/cuda-check"
    nvcc=$(tools/nvcc.sh)
    [ -n "$nvcc" ] || { echo "no nvcc: the kernels are not tested alone" && return 0; }
    flags=(-std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Isrc -Isrc/backend/cuda -Itests/cuda)
    kernels() { # kernels <program> <source> <shape's header> [option...]
        "$nvcc" "${flags[@]}" "-DSHAPE_HEADER=\"$3\"" "${@:4}" -o "$to/$1" "tests/cuda/$2.cu"
    }
    local large=model/shapes/qwen36_35b_a3b.h
    kernels decode_bench decode_bench $large && kernels prefill_bench prefill_bench $large &&
        kernels decode_cycles decode_bench $large -DDECODE_PROFILE &&
        kernels decode_race decode_bench model/shapes/mini.h -include tests/cuda/plain_ring.cuh &&
        kernels prefill_race prefill_bench emulator/prefill_shape.h -DFEWER_CASES &&
        kernels racecheck_control racecheck_control $large
}
if [ -n "$build" ]; then
    build_into "$build"
    exit
fi
if [ -z "$bin" ]; then
    bin=build/cuda-run
    build_into $bin || exit 1
fi
core=$bin/lily-core check=$bin/cuda-check

mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
touch "$work/table" "$work/failed" "$work/missed"

# step <name> <seconds at most> <command...>: its output to a log; a line for the table at the end.
step() {
    local name=$1 limit=$2 began=$SECONDS status left=$((seconds - SECONDS))
    shift 2
    [ $left -ge 2 ] || { skip "$name" "no time left" && return; }
    [ $left -ge "$limit" ] || limit=$left
    echo "== $name"
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    status=$?
    tail -n 12 "$out/$name.log"
    verdict "$name" $status $((SECONDS - began))
}
verdict() { # verdict <name> <status> <seconds>
    local word=ok few
    [ "$2" -eq 0 ] || { word="FAILED (status $2)" && echo "$1" >>"$work/failed"; }
    few=$(sed -n 's/^[0-9]* rows, [0-9]* checks failed, \([0-9]*\) goals missed$/\1/p' "$out/$1.log" | tail -n 1)
    echo "${few:-0}" >>"$work/missed"
    printf '%-18s %-22s %4d s%s\n' "$1" "$word" "$3" "${few:+, goals missed: $few}" >>"$work/table"
    echo "== $1: $word ($3 s)"
}
skip() {
    echo "== $1: skipped: $2"
    printf '%-18s skipped: %s\n' "$1" "$2" >>"$work/table"
}
wants() { [[ " ${steps[*]} " == *" $1 "* ]]; }

# ---- the program as a user starts it ---------------------------------------------------------
# row <what> <value> <unit> [at most]: into a step's log and the JSON; returns 1 above the limit.
row() {
    local good=1
    [ -z "${4:-}" ] || good=$(awk -v a="$2" -v b="$4" 'BEGIN { print (a != "" && a + 0 <= b + 0) }')
    printf '  %-60s %12s %s%s%s\n' "$1" "$2" "$3" "${4:+  (at most $4)}" "$([ "$good" = 1 ] || echo '  FAILED')"
    printf '%s  {"what": "%s", "value": %s, "unit": "%s"%s}' "$([ -s "$work/program.rows" ] && echo ,)" \
        "$1" "${2:-null}" "$3" "${4:+, \"limit\": $4, \"good\": $([ "$good" = 1 ] && echo true || echo false)}" \
        >>"$work/program.rows"
    echo >>"$work/program.rows"
    [ "$good" = 1 ]
}
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1; }

# hold_all_but <bytes>: another program takes the card's memory; release ends it.
hold_all_but() {
    local line
    coproc hold { "$check" --hold "$1"; }
    held=${hold[1]} holder=$hold_PID
    while read -r line <&"${hold[0]}"; do [[ $line == *"left free"* ]] && break; done
    echo "$line"
}
release() {
    exec {held}>&-
    wait "$holder"
}

# peak_of <command...>: runs it; peak: what the card held more than before, at most, in GB.
peak_of() {
    local before most now pid status
    before=$(used)
    most=$before
    "$@" &
    pid=$!
    while kill -0 $pid 2>/dev/null; do
        now=$(used)
        [ "$now" -le "$most" ] || most=$now
        sleep 0.1
    done
    wait $pid
    status=$?
    peak=$(awk -v a="$before" -v b="$most" 'BEGIN { print (b - a) * 1.048576e-3 }')
    return $status
}

# What 32,768 tokens of context take while they are in use: weights, scratch, session, saved states,
# kernels and the driver's context. On a card that is otherwise free, and on one with as much free
# as a card of 24 GB has, where a model is opened for fewer rows of a prompt at a time.
memory() {
    local status=0
    use_context "free card" || status=1
    row "memory at 32768 tokens of context, free card" "$peak" GB
    hold_all_but 22500000000
    use_context "22.5 GB free" || status=1
    row "memory at 32768 tokens of context, 22.5 GB free" "$peak" GB 22.5 || status=1
    release
    return $status
}
use_context() {
    local status
    peak_of "$core" bench -m "$full" --backend cuda --ctx 32768 -p 4096 -n 256 -d 28000 -r 1 >"$work/use"
    status=$?
    cat "$work/use"
    row "prompt of 4096 behind 28000, $1" "$(awk '$1 == "prefill" { print $4 }' "$work/use")" tok/s
    row "decode at 28000, $1" "$(awk '$1 == "decode" { print $4 }' "$work/use")" tok/s
    return $status
}

# From a packed file in the page cache to the first token: a whole process that writes one.
start() {
    local began status=0 i s all=()
    for i in 1 2 3; do
        began=$(date +%s%N)
        "$core" run -m "$full" --backend cuda --raw --max-tokens 1 "The" >"$work/token" || status=1
        s=$(awk -v a="$began" -v b="$(date +%s%N)" 'BEGIN { printf "%.3f", (b - a) * 1e-9 }')
        row "start to first token, run $i" "$s" s 5 || status=1
        all+=("$s")
    done
    row "start to first token, median" "$(printf '%s\n' "${all[@]}" | sort -n | sed -n 2p)" s 5 || status=1
    script -qec "$core run -m $full --backend cuda --raw --max-tokens 1 The" /dev/null </dev/null >"$work/terminal"
    row "terminals without a progress bar" "$(($(grep -c '\[#*\.*\] *[0-9]*%' "$work/terminal") == 0))" of_1 0 || status=1
    tr '\r' '\n' <"$work/terminal" | grep -a '%' | tail -n 1
    return $status
}

# `lily bench` itself: speed, GB/s, fraction of the bound in every row of decoding.
bench() {
    "$core" bench -m "$full" --backend cuda -p 512,4096 -n 128 -d 0,4096 -r 2 | tee "$work/bench" || return 1
    row "decode rows of bench without a fraction of the bound" \
        "$(awk '$1 == "decode" && !($8 ~ /%/ || $9 ~ /%/)' "$work/bench" | wc -l)" rows 0
}

# A card whose memory another program holds: a clear refusal, and the CPU where the choice is free.
refuses() { # refuses <bytes left> <arguments of run...>
    local left=$1 status=0
    shift
    hold_all_but "$left"
    "$core" run --backend cuda --raw --max-tokens 1 "$@" The >"$work/forced" 2>&1
    row "full card ($left bytes left): --backend cuda went on" "$(($? == 0))" of_1 0 || status=1
    cat "$work/forced"
    row "its message does not speak of memory" "$(($(grep -ci memory "$work/forced") == 0))" of_1 0 || status=1
    "$core" run --verbose --raw --max-tokens 1 "$@" The >"$work/free" 2>&1
    row "the CPU did not take over" "$(($? != 0))" of_1 0 || status=1
    cat "$work/free"
    echo
    release
    return $status
}
full_card() {
    local status=0
    refuses 1500000000 -m "$four" || status=1
    refuses 100000000 || status=1
    return $status
}

# in_shell <name> <function>: a step that is a function.
in_shell() {
    local began=$SECONDS status
    [ $SECONDS -lt $((seconds - 2)) ] || { skip "$1" "no time left" && return; }
    echo "== $1"
    "$2" >"$out/$1.log" 2>&1
    status=$?
    tail -n 20 "$out/$1.log"
    verdict "$1" $status $((SECONDS - began))
}

# ---- values, side by side: mostly the processor's work -------------------------------------
mkdir -p "${models:=$work}"
four=$models/four.lily full=$models/all.lily
most=$((seconds / 2 < 300 ? seconds / 2 : 300)) # seconds for all of these
for s in real older memcheck long full ncu; do
    wants $s && [ ! -e "$four" ] && "$core" synth --packed --layers 4 "$four"
done
make_full() {
    local s
    for s in memory start bench speed sweep; do
        wants $s && [ ! -e "$full" ] && "$core" synth --packed "$full"
    done
}
# What the cards without kernels of their own run, compiled from its PTX for this one.
older() {
    CUDA_FORCE_PTX_JIT=1 step "$@" stages logits cuts states batch company
}
in_all=$seconds
seconds=$((SECONDS + most < seconds ? SECONDS + most : seconds))
wants doctor && step doctor 60 "$core" doctor
wants mini && step mini $most "$check" --json "$work/mini.json" &
wants real && step real $most "$check" -m "$four" --against cpu --json "$work/real.json" &
wants older && { older older $most "$check" --capability 80 --json "$work/older.json"
    older older-real $most "$check" --capability 80 -m "$four" --against cpu --json "$work/older-real.json"; } &
make_full
wait
seconds=$in_all

# ---- one after the other ---------------------------------------------------------------------
if wants kernels; then
    if [ -x "$bin/prefill_bench" ]; then
        step kernels-decode 120 "$bin/decode_bench" check
        step kernels-prompt 120 "$bin/prefill_bench" check
    else
        skip kernels "$bin has no prefill_bench"
    fi
fi
wants speed && step speed 300 "$check" -m "$full" --json "$work/speed.json" speed batches
wants sweep && step sweep 120 "$check" -m "$full" --json "$work/sweep.json" sweep
wants memory && in_shell memory memory
wants start && in_shell start start
# The program runs once for each pass, which its kernels would have to be put back for otherwise.
profile_kernels() {
    local metrics=gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum m
    for m in sm__pipe_tensor_cycles sm__issue l1tex__data_pipe_lsu_wavefronts lts__t_sectors; do
        [[ $m == *lsu* || $m == lts* ]] || m+=_active
        metrics+=,$m.avg.pct_of_peak_sustained_elapsed
    done
    metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active
    for m in long_scoreboard short_scoreboard barrier wait math_pipe_throttle mio_throttle lg_throttle \
        gmma no_instruction membar; do
        metrics+=,smsp__average_warps_issue_stalled_${m}_per_issue_active.ratio
    done
    step ncu 120 ncu --replay-mode application --cache-control none --clock-control none \
        --profile-from-start off --csv --page raw --metrics $metrics --log-file "$out/ncu.csv" \
        "$check" -m "$four" steps
    [ -s "$out/ncu.csv" ] && python3 tests/cuda/kernel_table.py "$out/ncu.csv" >"$out/kernels.md"
}
if wants ncu; then
    if command -v ncu >/dev/null; then
        profile_kernels
    else
        skip ncu "it needs Nsight Compute"
    fi
    if [ -x "$bin/decode_cycles" ]; then
        step decode-cycles 120 "$bin/decode_cycles" time 50
        {
            printf '**Stages of the decode kernel**, 40 layers: cycles from where a layer begins in a '
            printf 'block to each mark (`docs/cuda-decode.md`), means over blocks and layers:\n\n'
            sed 's/^/    /' "$out/decode-cycles.log"
        } >>"$out/kernels.md"
    fi
fi
wants bench && in_shell bench bench
wants full && in_shell full full_card

# ---- what keeps the card busy for long, side by side -----------------------------------------
most=$((seconds - SECONDS < 300 ? seconds - SECONDS : 300))
# The stand-in runs the portable kernels, those for several sessions and in one-token steps the
# persistent one; four layers of the real shape run the prompt kernels of 9.0 too.
sanitize() { # sanitize <name> <tool> <arguments of cuda-check...>
    local name=$1 tool=$2
    shift 2
    step "$name" $most "$sanitizer" --tool "$tool" --error-exitcode 1 "$check" \
        --json "$work/$name.json" "$@"
}
# Racecheck takes minutes for what others do in a second, so it gets each kind of step once, without
# the persistent kernel, whose ring it cannot follow; that with a ring which it can
# (plain_ring.cuh), and the prompt kernels of 9.0 at the smallest shape that they take. The control
# tells what the tool can follow and must find its two races. Of the decode kernel four kinds are
# reported in each of its four launches, which docs/cuda.md explains: a fifth kind is a failure.
race() { # race <what> <most reports, or ""> <least> <program...>
    local what=$1 reports status left=$((seconds - SECONDS))
    [ $left -ge 2 ] || { echo "$what: no time left" && return 1; }
    timeout $left "$sanitizer" --tool racecheck "${@:4}" >"$work/race" 2>&1
    status=$?
    cat "$work/race"
    reports=$(grep -c 'Race reported' "$work/race")
    row "racecheck, $what: reports" "$reports" reports $2 || status=1
    [ "$reports" -ge "$3" ] || status=1
    return $status
}
races() {
    local kind status=0
    race "decode kernel" 16 0 --kernel-name kns=decode_step "$bin/decode_race" few || status=1
    for kind in named plain-each; do
        race "control $kind" 0 0 "$bin/racecheck_control" $kind || status=1
    done
    for kind in named-race plain-race; do
        race "control $kind" "" 1 "$bin/racecheck_control" $kind || status=1
    done
    for kind in bulk bulk-each plain plain-warp plain-meet; do
        race "control $kind" "" 0 "$bin/racecheck_control" $kind
    done
    race "prompt kernels" 0 0 --kernel-name-exclude kns=plain_ --kernel-name-exclude kns=fill_ \
        "$bin/prefill_race" check || status=1
    return $status
}
wants long && { step long-real $most "$check" -m "$four" --json "$work/long-real.json" long
    step long $most "$check" --json "$work/long.json" long; } &
if command -v "$sanitizer" >/dev/null; then
    wants memcheck && { sanitize memcheck memcheck states batch
        sanitize memcheck-real memcheck -m "$four" --against cpu states; } &
    wants synccheck && sanitize synccheck synccheck kinds &
    wants racecheck && step racecheck $most "$sanitizer" --tool racecheck --error-exitcode 1 \
        --kernel-name-exclude kns=decode_step "$check" --json "$work/racecheck.json" kinds &
    wants racecheck && [ -x "$bin/decode_race" ] && in_shell races races &
else
    for s in memcheck synccheck racecheck; do
        wants $s && skip $s "it needs compute-sanitizer of the CUDA toolkit"
    done
fi
wait

# ---- one document ----------------------------------------------------------------------------
{
    echo "{\"date\": \"$(date -u +%F)\","
    echo " \"device\": \"$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | head -n 1)\","
    echo " \"machine\": \"$(uname -sm), $(nproc) processors\","
    echo " \"commit\": \"$(cat "$bin/commit" 2>/dev/null || git describe --always --dirty)\","
    echo " \"failed_steps\": [$(sed 's/.*/"&"/' "$work/failed" | paste -sd ,)],"
    echo " \"program\": {\"rows\": ["
    cat "$work/program.rows" 2>/dev/null
    echo " ]}"
    for part in "$work"/*.json; do
        [ -e "$part" ] && echo ", \"$(basename "$part" .json)\":" && cat "$part"
    done
    echo "}"
} >"$out/cuda.json"
kernels=$out/kernels.md
[ -s "$kernels" ] || kernels=
python3 tests/cuda/report.py "$out/cuda.json" ${kernels:+"$kernels"} >"$out/cuda.md"
echo
cat "$work/table"
echo "goals missed: $(awk '{ n += $1 } END { print n + 0 }' "$work/missed"); $out/cuda.json"
if [ -s "$work/failed" ]; then
    echo "failed: $(paste -sd ' ' "$work/failed")"
    exit 1
fi
