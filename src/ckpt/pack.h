/* Writing packed files: whoever has the values fills each tensor, this does the rest. */
#ifndef LILY_CKPT_PACK_H
#define LILY_CKPT_PACK_H

#include "ckpt/packed.h"
#include "ckpt/work.h"

/* What a packed file is made of. */
struct pack_source {
    /* Writes one item's codes (or float32 values, for 32 bits) and its scales and biases. Called
     * from several threads at once. */
    int (*fill)(void *arg, const struct packed_tensor *t, int32_t item, uint8_t *codes,
                uint16_t *scales, uint16_t *biases, lily_err *err);
    void *arg;
    const struct texts *texts;
    int32_t vocab_used;
    const char *source; /* "MLX 4-bit folder", ... kept in the file */
};

/* Writes plan (made, not yet placed) to out, atomically, on all cores: sections are filled,
 * hashed and written in parallel. Nothing is left behind on failure. */
int pack_write(struct packed_plan *plan, const struct pack_source *source, const char *out,
               struct work *work, lily_err *err);

/* LILY_ENOSPC when the file system that out will lie on has fewer bytes free. */
int pack_check_space(const char *out, uint64_t bytes, lily_err *err);

/* Words a write that failed with rc: what was needed and what to do, when the disk was full. */
int pack_write_failed(const char *out, uint64_t bytes, int rc, lily_err *err);

#endif
