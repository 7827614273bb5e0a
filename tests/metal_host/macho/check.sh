#!/bin/sh
# The whole Metal backend, kernel texts included, compiled for arm64 macOS and linked as Mach-O
# against stubs: it uses no symbol that is not listed here, and every message is cast rightly.
#     check.sh <out>
set -eu
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../../.." && pwd)
stubs=$top/tools/metal_emulator/macho
for tool in clang-19 ld64.lld-19; do
    command -v $tool >/dev/null || { echo "skipped: the Mach-O check needs $tool"; exit 0; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$top"
n=0
for source in src/backend/metal/*.c src/backend/check.c src/backend/selftest.c src/base/err.c \
    src/base/buf.c src/model/*.c src/model/shapes/*.c "$here/entry.c"; do
    n=$((n + 1))
    clang-19 -target arm64-apple-macosx14.0 -ffreestanding -nostdlibinc -isystem "$here/include" \
        -std=c11 -O2 -DLILY_METAL -Iinclude -Isrc -Wall -Wextra -Wshadow -Wconversion \
        -Wno-sign-conversion -Wstrict-prototypes -Wmissing-prototypes -Werror \
        -c "$source" -o "$work/$n.o"
done
tools/metal_sources.sh src/backend/metal/kernels/*.metal src/backend/metal/kernels/*.h \
    src/model/shapes/shape_common.h >"$work/sources.S"
clang-19 -target arm64-apple-macosx14.0 -c "$work/sources.S" -o "$work/sources.o"
ld64.lld-19 -arch arm64 -platform_version macos 14.0 14.0 -o "$1" "$work"/*.o \
    "$stubs/libMetal.tbd" "$stubs/libobjc.tbd" "$here/libc.tbd" "$here/libutf8proc.tbd"
[ "$(od -An -tx1 -N8 "$1" | tr -d ' ')" = cffaedfe0c000001 ] ||
    { echo "FAILED: not a Mach-O file for arm64"; exit 1; }
echo "macho: the Metal backend, $n C files and its kernel texts, links for arm64 macOS"
