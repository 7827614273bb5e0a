#!/bin/bash
# The CUDA backend on the GPU of this machine: correctness against ref and the CPU backend,
# compute-sanitizer, speed. Builds lily-core and cuda-check, or takes ones that were built elsewhere
# (a machine without libraries or network: both need only a C library).
#   tests/cuda/run.sh [--core FILE] [--check FILE] [--out FOLDER] [step ...]
# Steps: mini real sanitizer speed long; without any, all but long. Every step runs even when one
# before it failed; exit status 1 when any did. One JSON document, FOLDER/cuda.json, holds it all.
set -u
cd "$(dirname "$0")/../.." || exit 1
core= check= out=bench/cuda steps=()
while [ $# -gt 0 ]; do
    case $1 in
    --core) core=$2 && shift 2 ;;
    --check) check=$2 && shift 2 ;;
    --out) out=$2 && shift 2 ;;
    *) steps+=("$1") && shift ;;
    esac
done
[ ${#steps[@]} -gt 0 ] || steps=(mini real sanitizer speed)
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ -z "$core" ] || [ -z "$check" ]; then
    make -j"$(nproc)" core build/release/cuda-check || exit 1
    core=build/release/lily-core check=build/release/cuda-check
fi
failed=()

step() { # step <name> <seconds at most> <command...>: its output to a log and here
    local name=$1 limit=$2 began=$SECONDS
    shift 2
    echo "== $name"
    if timeout "$limit" "$@" >"$out/$name.log" 2>&1; then
        tail -n 40 "$out/$name.log"
        echo "== $name: ok ($((SECONDS - began)) s)"
    else
        echo "== $name: FAILED (status $?, $((SECONDS - began)) s)"
        tail -n 60 "$out/$name.log"
        failed+=("$name")
    fi
}
wants() { [[ " ${steps[*]} " == *" $1 "* ]]; }

step doctor 60 "$core" doctor
if wants mini; then
    step mini 300 "$check" --json "$work/mini.json"
fi
if wants real; then
    step real 600 "$check" --synth 4 --against cpu --json "$work/real.json"
fi
if wants sanitizer; then
    if command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
            step "$tool" 600 compute-sanitizer --tool "$tool" --error-exitcode 1 "$check" --json \
                "$work/$tool.json" states batch
        done
    else
        echo "skipped: memcheck and racecheck need compute-sanitizer of the CUDA toolkit"
    fi
fi
if wants speed; then
    step speed 600 "$check" --synth 40 --against cpu --json "$work/speed.json" speed \
        profile
fi
if wants long; then
    step long 1200 "$check" --json "$work/long.json" long
fi

{
    echo "{\"date\": \"$(date -u +%F)\","
    echo " \"device\": \"$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | head -n 1)\","
    echo " \"commit\": \"$(git rev-parse --short HEAD 2>/dev/null)\""
    for part in "$work"/*.json; do
        [ -e "$part" ] && echo ", \"$(basename "$part" .json)\":" && cat "$part"
    done
    echo "}"
} >"$out/cuda.json"
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
echo "all ok; $out/cuda.json"
