#!/bin/sh
# The Mach-O check accepts a right host and refuses an unlisted symbol, an uncast message and a
# system header.
cd "$(dirname "$0")" || exit 1
check=../../tools/metal_emulator/macho/check.sh
for tool in clang-19 ld64.lld-19; do
    command -v $tool >/dev/null || { echo "skipped: the Mach-O check needs $tool"; exit 0; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

$check "$work/right" || failed=1
# The Mach-O magic of a 64-bit little-endian file, then the CPU type of arm64.
[ "$(od -An -tx1 -N8 "$work/right" | tr -d ' ')" = cffaedfe0c000001 ] || {
    echo "FAILED: not a Mach-O file for arm64"
    failed=1
}

refused() { # refused <what> <reason in the output> <text of the file>
    printf '%s\n' "$3" >"$work/wrong.c"
    if $check "$work/wrong" "$work/wrong.c" >"$work/log" 2>&1; then
        echo "FAILED: $1 was accepted"
        failed=1
    elif ! grep -q "$2" "$work/log"; then
        echo "FAILED: $1 was refused for another reason:"
        cat "$work/log"
        failed=1
    else
        echo "refused, as it should be: $1"
    fi
}
header=$(pwd)/../../src/backend/metal/mtl.h
refused "an unlisted symbol" "undefined symbol: _system" \
    'int system(const char *command); int main(void) { return system("ls"); }'
refused "an uncast message" "too many arguments" \
    "#include \"$header\"
int main(void) { objc_msgSend(NULL, NULL); }"
refused "an argument of the wrong type" "passing" \
    "#include \"$header\"
int main(void) { mtl_dispatch(NULL, 4, (MTLSize){1, 1, 1}); }"
refused "a system header" "file not found" '#include <stdio.h>
int main(void) { return 0; }'
exit $failed
