/* The stand-in checkpoint, linked into the program's read-only data: each file between two labels,
 * aligned for direct use. src/ckpt/folder.c names the same files in the same order. The folder comes
 * with -I. An assembler macro, since statement separators differ between systems. */
#if defined(__APPLE__)
#define LABEL(name) _##name
    .const
#else
#define LABEL(name) name
    .section .rodata
#endif

.macro embed label, file
    .balign 4096
    .globl \label\()_begin
\label\()_begin:
    .incbin "\file"
    .globl \label\()_end
\label\()_end:
    .byte 0
.endm

    embed LABEL(embedded_config), config.json
    embed LABEL(embedded_index), model.safetensors.index.json
    embed LABEL(embedded_model), model.safetensors
    embed LABEL(embedded_tokenizer), tokenizer.json
    embed LABEL(embedded_tokenizer_config), tokenizer_config.json
    embed LABEL(embedded_generation_config), generation_config.json

#if defined(__linux__) && defined(__ELF__)
    .section .note.GNU-stack,"",%progbits
#endif
