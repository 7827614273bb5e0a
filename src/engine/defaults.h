/* What a checkpoint says about ending a turn and about sampling: generation_config.json, the end
 * ids of config.json, and the model card's tables for the shapes that have one. */
#ifndef LILY_ENGINE_DEFAULTS_H
#define LILY_ENGINE_DEFAULTS_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "lily.h"
#include "text/tokenizer.h"

enum { DEFAULTS_STOPS = 16 };

struct defaults {
    lily_sampling thinking, no_thinking;
    int32_t stops[DEFAULTS_STOPS]; /* [n_stops] end-of-turn ids */
    int32_t n_stops;
};

/* A text file of the checkpoint; text NULL: absent. */
struct text_file {
    const char *text;
    size_t size;
};

/* shape: the shape's name, which selects the card's table. tokenizer may be NULL; its "<|im_end|>"
 * and "<|endoftext|>" end a turn whatever the files say, for the chat template uses them. Wrong
 * types and values out of range are errors that name the file and the field. */
int defaults_read(const char *shape, const struct text_file *generation_config,
                  const struct text_file *config, const struct tokenizer *tokenizer, int32_t vocab,
                  struct defaults *out, lily_err *err);

#endif
