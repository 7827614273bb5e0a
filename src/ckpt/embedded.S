/* The stand-in checkpoint, linked into the program's read-only data: each file between two labels,
 * aligned for direct use. src/ckpt/folder.c names the same files in the same order. */
#if defined(__APPLE__)
#define LABEL(name) _##name
    .const
#else
#define LABEL(name) name
    .section .rodata
#endif
#define FILE(name, path) \
    .balign 4096 ; .globl LABEL(name##_begin) ; LABEL(name##_begin): ; .incbin path ; \
    .globl LABEL(name##_end) ; LABEL(name##_end): ; .byte 0

FILE(embedded_config, STANDIN "/config.json")
FILE(embedded_index, STANDIN "/model.safetensors.index.json")
FILE(embedded_model, STANDIN "/model.safetensors")
FILE(embedded_tokenizer, STANDIN "/tokenizer.json")
FILE(embedded_tokenizer_config, STANDIN "/tokenizer_config.json")
FILE(embedded_generation_config, STANDIN "/generation_config.json")

#if defined(__linux__) && defined(__ELF__)
    .section .note.GNU-stack,"",%progbits
#endif
