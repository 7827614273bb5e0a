#!/bin/sh
# Runs the test programs one after another, also behind one that fails, and keeps what they measured
# and how long each took as lines of JSON.
#     run.sh quick|full <figures.jsonl> <program...>
set -u
amount=$1
figures=$2
shift 2
failed=
rm -f "$figures"
for program in "$@"; do
    name=$(basename "$program")
    began=$(date +%s)
    passed=true
    "$program" "$amount" "$figures" || passed=false
    [ $passed = true ] || failed="$failed $name"
    printf '{"test": "%s", "passed": %s, "seconds": %d}\n' \
        "$name" $passed $(($(date +%s) - began)) >>"$figures"
done
[ -z "$failed" ] || { echo "metal: FAILED:$failed"; exit 1; }
echo "metal: all $# programs passed"
