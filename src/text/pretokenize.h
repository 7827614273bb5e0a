/* Cuts text into the pieces that byte-pair merges never cross, by the split expression of a
 * tokenizer.json. */
#ifndef LILY_TEXT_PRETOKENIZE_H
#define LILY_TEXT_PRETOKENIZE_H

#include <stddef.h>

#include "base/err.h"

struct splitter; /* immutable: any number of threads */

/* expression: in the syntax that the Rust library reads (Oniguruma). */
int splitter_new(const char *expression, size_t n, struct splitter **out, lily_err *err);
void splitter_free(struct splitter *s);

/* Nonzero ends the split and is returned. */
typedef int (*splitter_fn)(void *arg, const char *piece, size_t n);

/* Calls fn for every match and for every gap between matches, in order (behaviour "isolated").
 * text: valid UTF-8. */
int splitter_run(const struct splitter *s, const char *text, size_t n, splitter_fn fn, void *arg,
                 lily_err *err);

#endif
