#!/bin/sh
# Runs the end-to-end tests in two parts side by side: those of the server wait for clocks most of
# their time. Their output comes behind that of the others.
#     run_e2e.sh PYTHON [pytest's option...]
python=$1
shift
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export python log
# The inner shell's own variables.
# shellcheck disable=SC2016
part='part=$1
shift
if [ "$part" = server ]; then
    "$python" -m pytest -q -rs tests/e2e/test_server*.py "$@" >"$log" 2>&1
else
    "$python" -m pytest -q -rs tests/e2e --ignore-glob="*/test_server*" "$@"
fi'
status=0
printf 'server\nothers\n' | xargs -P 2 -I{} sh -c "$part" sh {} "$@" || status=1
cat "$log"
exit $status
