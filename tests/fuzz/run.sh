#!/bin/sh
# Runs each fuzzer for a few seconds from its committed seeds (tests/fuzz/seeds/<name>/, if any), as
# many at a time as there are cores. A crash leaves its input beside the fuzzer and fails the run.
#     run.sh SECONDS FUZZER...
export each="${1:-20}"
shift
cores=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
# The inner shell's own variables.
# shellcheck disable=SC2016
one='name=$(basename "$1")
corpus="$(dirname "$1")/corpus-$name"
seeds="tests/fuzz/seeds/${name#fuzz_}"
[ -d "$seeds" ] || seeds=""
mkdir -p "$corpus"
# An empty list of seeds is no argument.
if "$1" -max_total_time="$each" -rss_limit_mb=4096 -timeout=60 -verbosity=0 -print_final_stats=1 \
    -artifact_prefix="$corpus/crash-" "$corpus" $seeds >"$1.log" 2>&1; then
    echo "$name: $(sed -n "s/stat::number_of_executed_units: *//p" "$1.log") inputs, ok"
else
    echo "$name: FAILED, inputs in $corpus"
    tail -40 "$1.log"
    exit 1
fi'
printf '%s\n' "$@" | xargs -P "$cores" -I{} sh -c "$one" sh {}
