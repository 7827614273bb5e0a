/* Tensors by name -> struct weights: the names of an MLX or a Hugging Face folder, every dtype,
 * shape and range checked, values that cannot be right (NaN, infinity) refused by name and index.
 *
 * Which layout a folder has is read from the file alone: a conv1d weight [channels, 4, 1] marks a
 * converted file, whose norms already hold 1 + w; [channels, 1, 4] marks Hugging Face's own layout,
 * where 1 is added here. Nothing else decides it (model names and file names lie). */
#ifndef LILY_CKPT_BIND_H
#define LILY_CKPT_BIND_H

#include "ckpt/catalog.h"
#include "ckpt/config.h"
#include "ckpt/pool.h"
#include "ckpt/table.h"
#include "ckpt/work.h"

struct bind_stats {
    struct {
        size_t tensors;
        uint64_t bytes;
    } class[CLASS_COUNT], vision, mtp, unknown;
    bool converted; /* MLX layout: norms already hold 1 + w */
};

struct bind_options {
    /* The matrices will be quantised: 1 + w of a norm is rounded to bf16, as MLX converts it. */
    bool round_norms;
    /* 16-bit matrices are checked by whoever reads them next (the quantiser). */
    bool skip_matrix_scan;
    struct work *work; /* progress of reading scales and biases; may be NULL */
};

/* Fills *w, whose pointers lead into c's mappings and p's memory: both must outlive it. c's entries
 * that were bound or knowingly skipped are marked used. An inspection (f->list) gets the weights as
 * far as they could be bound; they must not be run. */
int bind_weights(struct catalog *c, const struct config *config, const char *where,
                 const struct bind_options *options, struct pool *p, struct weights *w,
                 struct bind_stats *stats, struct faults *f);

/* Tensors that a text engine leaves out knowingly, by their names' prefixes. */
enum bind_skip { SKIP_NONE, SKIP_VISION, SKIP_MTP };
enum bind_skip bind_skipped(const char *name);

#endif
