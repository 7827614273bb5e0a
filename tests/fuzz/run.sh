#!/bin/sh
# Runs each fuzzer for a few seconds from its committed seeds (tests/fuzz/seeds/<name>/, if any).
# A crash leaves its input beside the fuzzer and fails the run. First argument: seconds for each.
each=${1:-20}
shift
failed=0
for fuzzer in "$@"; do
    name=$(basename "$fuzzer")
    corpus="$(dirname "$fuzzer")/corpus-$name"
    seeds="tests/fuzz/seeds/${name#fuzz_}"
    [ -d "$seeds" ] || seeds=""
    mkdir -p "$corpus"
    # shellcheck disable=SC2086 # an empty list of seeds is no argument
    if "$fuzzer" -max_total_time="$each" -rss_limit_mb=4096 -timeout=10 -verbosity=0 -print_final_stats=1 \
        -artifact_prefix="$corpus/crash-" "$corpus" $seeds >"$fuzzer.log" 2>&1; then
        echo "$name: $(sed -n 's/stat::number_of_executed_units: *//p' "$fuzzer.log") inputs, ok"
    else
        echo "$name: FAILED, inputs in $corpus"
        tail -40 "$fuzzer.log"
        failed=1
    fi
done
exit $failed
