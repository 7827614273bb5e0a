/* The table of embedded kernels (src/backend/cuda/module.c) of the emulated card: images are names.
 */
#include <stddef.h>

#include "check.h"

struct embedded {
    const char *shape, *file;
    const void *image;
};
extern const struct embedded cuda_embedded[];
#define FILE(name)                                                                                 \
    { "mini", "portable_" name, "mini/portable_" name }
const struct embedded cuda_embedded[] = {
    FILE("attention"), FILE("deltanet"),  FILE("gemm"),
    FILE("matvec"),    FILE("moe"),       FILE("norm"),
    FILE("thin"),      FILE("sample"),    FILE("small"),
    FILE("batch"),     FILE("batch_mix"), {"mini", "batch_tiles", "mini/batch_tiles"},
    {NULL, NULL, NULL}};

/* The stand-in's are in the program. */
const struct weights *emulated_weights(void) {
    return NULL;
}
