#!/bin/sh
# Runs the end-to-end tests in three parts side by side, for most of their time they wait: for
# clocks, and for programs to end. One part shows its progress, the others' output comes behind it.
#     run_e2e.sh PYTHON [pytest's option...]
python=$1
shift
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export python logs
# The inner shell's own variables.
# shellcheck disable=SC2016
part='part=$1
shift
log=$logs/$part
case $part in
server) "$python" -m pytest -q -rs tests/e2e/test_server*.py "$@" >"$log" 2>&1 ;;
cli) "$python" -m pytest -q -rs tests/e2e/test_cli.py tests/e2e/test_eval.py "$@" >"$log" 2>&1 ;;
*) "$python" -m pytest -q -rs tests/e2e --ignore-glob="*/test_server*" \
    --ignore=tests/e2e/test_cli.py --ignore=tests/e2e/test_eval.py "$@" ;;
esac'
status=0
printf '%s\n' server cli others | xargs -P 3 -I{} sh -c "$part" sh {} "$@" || status=1
cat "$logs/cli" "$logs/server"
exit $status
