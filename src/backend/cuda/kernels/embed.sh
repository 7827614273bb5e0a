#!/bin/sh
# Writes the assembler source of the table of kernels (module.c) for fatbins named
# <folder>/<shape>/<file>.fatbin, <shape> being a header of src/model/shapes (run it from the
# repository's root). Without arguments the table is empty.
set -eu
echo '    .section .rodata'
n=0
for path in "$@"; do
    file=$(basename "$path" .fatbin)
    shape=$(basename "$(dirname "$path")")
    name=$(sed -n 's/^#define SHAPE_NAME *"\(.*\)".*/\1/p' "src/model/shapes/$shape.h")
    echo "shape$n: .asciz \"$name\""
    echo "file$n: .asciz \"$file\""
    echo '    .balign 16'
    echo "image$n: .incbin \"$path\""
    n=$((n + 1))
done
echo '    .section .data.rel.ro,"aw"'
echo '    .balign 8'
echo '    .globl cuda_embedded'
echo '    .hidden cuda_embedded'
echo 'cuda_embedded:'
i=0
while [ $i -lt $n ]; do
    echo "    .quad shape$i, file$i, image$i"
    i=$((i + 1))
done
echo '    .quad 0, 0, 0'
echo '    .section .note.GNU-stack,"",%progbits'
