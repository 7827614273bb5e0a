/* The emulated card's kernels of the smallest shape that the prompt kernels of sm_90a take, and a
 * model of it with random weights: the host part of prompts (prompt.c, scratch.c) from end to end.
 */
#include <stdio.h>

#include "../../unit/ref_tiny.h"
#include "check.h"
#include "ckpt/quantise.h"
#include "emulator/prefill_shape.h"
#include "model/shape_table.h"

struct embedded {
    const char *shape, *file;
    const void *image;
};
extern const struct embedded cuda_embedded[];
#define FILE(name)                                                                                 \
    { SHAPE_NAME, name, SHAPE_NAME "/" name }
const struct embedded cuda_embedded[] = {
    FILE("portable_attention"), FILE("portable_deltanet"),  FILE("portable_gemm"),
    FILE("portable_matvec"),    FILE("portable_moe"),       FILE("portable_norm"),
    FILE("portable_thin"),      FILE("portable_sample"),    FILE("portable_small"),
    FILE("portable_batch"),     FILE("portable_batch_mix"), FILE("prefill_norm"),
    FILE("prefill_route"),      FILE("prefill_deltanet"),   FILE("prefill_attention"),
    FILE("prefill_gemm"),       FILE("prefill_small"),      {NULL, NULL, NULL}};

/* Lives as long as the program. Logits are made as flat as a real model's, whose divergence from
 * the truth the checks limit. */
const struct weights *emulated_weights(void) {
    static struct tiny tiny;
    static struct pool pool;
    static float norm[SHAPE_HIDDEN];
    const uint8_t *bad;
    lily_err err;
    tiny_make(&tiny, &shape_prefill);
    for (int i = 0; i < SHAPE_HIDDEN; i++) norm[i] = tiny.w.final_norm[i] / 8;
    tiny.w.final_norm = norm;
    if (quantise_weights(&tiny.w, &pool, NULL, &bad, &err) == LILY_OK) return &tiny.w;
    fprintf(stderr, "%s\n", err.msg);
    return NULL;
}
