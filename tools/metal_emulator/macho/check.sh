#!/bin/sh
# Proves that C files of the Metal host compile for arm64 macOS without an SDK and link as Mach-O
# against the symbols listed in the .tbd files beside this script, and no others.
#     check.sh <out> [file.c ...]     default: every_method.c, which calls all of mtl.h
# Options for the compiler: CFLAGS_MACHO. Needs clang-19 and ld64.lld-19 (Debian's lld-19).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 1 ] || { echo "usage: check.sh <out> [file.c ...]" >&2; exit 2; }
out=$1
shift
[ $# -gt 0 ] || set -- "$here/every_method.c"
for tool in clang-19 ld64.lld-19; do
    command -v $tool >/dev/null || { echo "macho check: needs $tool" >&2; exit 3; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

n=0
for source in "$@"; do
    n=$((n + 1))
    # shellcheck disable=SC2086
    clang-19 -target arm64-apple-macosx15.0 -ffreestanding -nostdlibinc -std=c11 -O2 \
        -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion -Werror \
        ${CFLAGS_MACHO:-} -c "$source" -o "$work/$n.o"
done
ld64.lld-19 -arch arm64 -platform_version macos 15.0 15.0 -o "$out" "$work"/*.o \
    "$here/libMetal.tbd" "$here/libobjc.tbd" "$here/libSystem.tbd"
echo "macho check: $n files linked"
