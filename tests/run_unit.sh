#!/bin/sh
# Runs each unit test program in its own process with a time limit; one line per program, all of the
# output of those that fail, and the totals at the end.
passed=0
failed=0
skipped=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for program in "$@"; do
    name=$(basename "$program")
    if timeout 600 "$program" >"$log" 2>&1; then status=ok; else status="FAILED ($?)"; fi
    p=$(grep -c '^\[       OK \]' "$log")
    s=$(grep -c '^\[  SKIPPED \] [^0-9]' "$log")
    f=$(grep -c '^\[  FAILED  \] [^0-9]' "$log")
    [ "$status" = ok ] || [ "$f" -gt 0 ] || f=1 # died outside a test
    echo "$name: $p passed, $s skipped: $status"
    [ "$status" = ok ] || cat "$log"
    passed=$((passed + p)) skipped=$((skipped + s)) failed=$((failed + f))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
