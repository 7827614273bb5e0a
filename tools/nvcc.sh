#!/bin/sh
# Prints the path of an nvcc that can compile the CUDA kernels, or nothing, saying why on stderr when
# one was found but cannot be used. The Makefile and tools/deps.sh ask it.
cd "$(dirname "$0")/.." || exit 1
for found in "$(command -v nvcc)" /usr/local/cuda/bin/nvcc \
    .venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc; do
    [ -x "$found" ] || continue
    release=$("$found" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
    if [ "${release:-0}" -lt 13 ]; then
        echo "$found: found release ${release:-unknown}, expected 13.0 or newer; passed over" >&2
    elif ! command -v g++ >/dev/null 2>&1; then
        echo "$found: it needs g++, which is missing; passed over" >&2
    else
        echo "$found"
        exit 0
    fi
done
