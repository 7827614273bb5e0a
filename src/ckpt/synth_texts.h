/* The text files of a synthetic checkpoint: an MLX-style config.json, generation_config.json, and
 * the smallest tokenizer that can spell anything (256 bytes and the control tokens). */
#ifndef LILY_CKPT_SYNTH_TEXTS_H
#define LILY_CKPT_SYNTH_TEXTS_H

#include "ckpt/texts.h"
#include "model/shape.h"

/* Fills t's data with malloc'd texts; the caller frees them with synth_texts_free. */
int synth_texts_make(const struct shape *s, int32_t layers, struct texts *t, int32_t *vocab_used,
                     lily_err *err);
void synth_texts_free(struct texts *t);

#endif
