#!/bin/sh
# Runs groups of Python tests side by side: each of them waits most of its time, or keeps one core
# busy. The first shows its progress, the output of the others comes behind it.
#     run_pytest.sh PYTHON GROUP... -- [option of all...]     a group: its files and options, one word
python=$1
shift
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export python logs
n=0
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    n=$((n + 1))
    printf '%s\n' "$1" >"$logs/$n.group"
    shift
done
[ $# -eq 0 ] || shift
# The inner shell's own variables.
# shellcheck disable=SC2016
one='n=$1
shift
run() { "$python" -B -m pytest -q -rs $(cat "$logs/$n.group") "$@"; }
if [ "$n" -eq 1 ]; then run "$@"; else run "$@" >"$logs/$n" 2>&1; fi'
status=0
seq 1 "$n" | xargs -P "$n" -I{} sh -c "$one" sh {} "$@" || status=1
for i in $(seq 2 "$n"); do cat "$logs/$i"; done
exit $status
