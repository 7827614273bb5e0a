#!/bin/sh
# Writes the assembly that links Metal kernel sources into the program, one zero-terminated text for
# each file, and the table of their names (src/backend/metal/source.h).
#     metal_sources.sh file...
cat <<'END'
#if defined(__APPLE__)
#define TABLE _metal_sources
#define TEXTS .const
#define POINTERS .section __DATA,__const
#else
#define TABLE metal_sources
#define TEXTS .section .rodata
#define POINTERS .section .data.rel.ro,"aw"
#endif
    TEXTS
END
n=0
for file in "$@"; do
    echo "metal_name_$n:"
    echo "    .asciz \"$(basename "$file")\""
    echo "metal_text_$n:"
    echo "    .incbin \"$file\""
    echo "    .byte 0"
    n=$((n + 1))
done
echo "    POINTERS"
echo "    .balign 8"
echo "    .globl TABLE"
echo "TABLE:"
i=0
while [ $i -lt $n ]; do
    echo "    .quad metal_name_$i, metal_text_$i"
    i=$((i + 1))
done
cat <<'END'
    .quad 0, 0
#if defined(__linux__) && defined(__ELF__)
    .section .note.GNU-stack,"",%progbits
#endif
END
