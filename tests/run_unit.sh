#!/bin/sh
# Runs each unit test program in its own process with a time limit, as many at a time as there are
# cores, the longest first; one line per program, all of the output of those that fail, and the
# totals at the end.
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
export logs
cores=$(nproc 2>/dev/null || sysctl -n hw.ncpu)
longest_first='/(ref_golden|_model)$/ {print; next} {rest = rest $0 "\n"} END {printf "%s", rest}'
printf '%s\n' "$@" | awk "$longest_first" | xargs -P "$cores" -I{} sh -c '
    log=$logs/$(basename {})
    if command -v timeout >/dev/null; then timeout 3600 {}; else {}; fi >"$log" 2>&1
    echo $? >"$log.status"'

# The number in cmocka's closing line of that kind, summed over the program's groups.
total() {
    sed -n "s/^\[  $1 *\] \([0-9][0-9]*\) test(s).*/\1/p" "$log" | awk '{n += $1} END {print n + 0}'
}
passed=0
failed=0
skipped=0
for program in "$@"; do
    log=$logs/$(basename "$program")
    status=$(cat "$log.status")
    p=$(grep -c '^\[       OK \]' "$log")
    s=$(total SKIPPED)
    f=$(total FAILED)
    [ "$status" -eq 0 ] || [ "$f" -gt 0 ] || f=1 # died outside a test
    if [ "$status" -eq 0 ]; then
        echo "$(basename "$program"): $p passed, $s skipped"
        # A test that skips says why on the line before.
        awk '/^\[  SKIPPED \] [^0-9]/ && !seen[$4]++ {print "  skipped: " $4 (why ? ", " why : "")}
             {why = /^\[/ ? "" : $0}' "$log"
    else
        echo "$(basename "$program"): FAILED, exit status $status"
        cat "$log"
    fi
    passed=$((passed + p)) skipped=$((skipped + s)) failed=$((failed + f))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
