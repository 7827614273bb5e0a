#!/bin/sh
# Runs the test programs, one a core, also behind one that fails, and keeps what they measured and
# how long each took as lines of JSON. A program's output is shown when it has ended.
#     run.sh quick|full <figures.jsonl> <program...>
set -u
amount=$1
figures=$2
shift 2
jobs=$(nproc 2>/dev/null || echo 2)
outputs=$(mktemp -d)
trap 'rm -rf "$outputs"' EXIT
rm -f "$figures"
# The inner shell's own variables: $0 amount, $1 figures, $2 folder of outputs, $3 program.
# shellcheck disable=SC2016
one='name=$(basename "$3")
began=$(date +%s)
passed=true
"$3" "$0" "$1" >"$2/$name" 2>&1 || passed=false
printf "{\"test\": \"%s\", \"passed\": %s, \"seconds\": %d}\n" \
    "$name" $passed $(($(date +%s) - began)) >>"$1"
cat "$2/$name"'
printf '%s\n' "$@" | xargs -P "$jobs" -n 1 sh -c "$one" "$amount" "$figures" "$outputs"
if grep '"passed": false' "$figures"; then
    echo "metal: FAILED"
    exit 1
fi
echo "metal: all $# programs passed"
