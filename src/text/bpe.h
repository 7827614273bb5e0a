/* Byte-pair merges: ids of the parts in, ids after merging out. Knows nothing of text. */
#ifndef LILY_TEXT_BPE_H
#define LILY_TEXT_BPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* (left, right) -> (rank, merged id): an open-addressed table, immutable once filled. */
struct bpe_merge {
    uint64_t pair; /* left << 32 | right; BPE_NO_PAIR: empty slot */
    uint32_t rank; /* order in the file: lower merges first */
    int32_t id;
};
struct bpe_table {
    struct bpe_merge *slots; /* [mask + 1], a power of two */
    size_t mask;
};
#define BPE_NO_PAIR UINT64_MAX

int bpe_table_init(struct bpe_table *t, size_t n_merges, lily_err *err);
/* At most n_merges calls. A pair given twice keeps the last rank, as the Rust library does. */
void bpe_table_set(struct bpe_table *t, int32_t left, int32_t right, uint32_t rank, int32_t id);
void bpe_table_free(struct bpe_table *t);

/* Memory of one merging thread, reused from piece to piece. Zero-initialise. */
struct bpe_scratch {
    struct bpe_symbol *symbols; /* [cap] */
    uint64_t *heap;             /* [heap_cap] */
    size_t cap, heap_cap;
};
void bpe_scratch_free(struct bpe_scratch *s);

/* Merges ids[n] in place until no adjacent pair is in the table, always the pair of lowest rank and
 * of those the leftmost; returns how many ids are left, 0 when out of memory. O(n log n). */
size_t bpe_merge_ids(const struct bpe_table *t, struct bpe_scratch *s, int32_t *ids, size_t n);

#endif
