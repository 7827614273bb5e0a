#include "text/bpe.h"

#include <stdlib.h>

#include "base/buf.h"

/* The key of a pair of ids, which are never negative: never BPE_NO_PAIR. */
static uint64_t pair_of(int32_t left, int32_t right) {
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

/* Where the pair is, or the empty slot where it would go. Fibonacci hashing: the multiplier is 2^64
 * over the golden ratio, whose upper product bits mix both ids. The table is at most half full. */
static size_t slot_of(const struct bpe_table *t, uint64_t pair) {
    size_t i = (size_t)((pair * 0x9e3779b97f4a7c15u) >> 20) & t->mask;
    while (t->slots[i].pair != BPE_NO_PAIR && t->slots[i].pair != pair) i = (i + 1) & t->mask;
    return i;
}

int bpe_table_init(struct bpe_table *t, size_t n_merges, lily_err *err) {
    size_t slots = 16, bytes;
    while (slots / 2 < n_merges) {
        if (!size_mul(slots, 2, &slots)) return ERR_NOMEM(err, "merges");
    }
    if (!size_mul(slots, sizeof *t->slots, &bytes)) return ERR_NOMEM(err, "merges");
    t->slots = malloc(bytes);
    if (!t->slots) return ERR_NOMEM(err, "merges");
    for (size_t i = 0; i < slots; i++) t->slots[i].pair = BPE_NO_PAIR;
    t->mask = slots - 1;
    return 0;
}

void bpe_table_set(struct bpe_table *t, int32_t left, int32_t right, uint32_t rank, int32_t id) {
    uint64_t pair = pair_of(left, right);
    t->slots[slot_of(t, pair)] = (struct bpe_merge){.pair = pair, .rank = rank, .id = id};
}

void bpe_table_free(struct bpe_table *t) {
    free(t->slots);
    *t = (struct bpe_table){0};
}

void bpe_scratch_free(struct bpe_scratch *s) {
    free(s->symbols);
    free(s->heap);
    *s = (struct bpe_scratch){0};
}

/* The symbols of a piece are a doubly linked list inside an array; a merge writes the left symbol
 * and unlinks the right one. */
struct bpe_symbol {
    int32_t id;
    int32_t prev, next; /* -1: none */
    uint32_t rank;      /* of the pair (this, next); NO_RANK: no such merge, or unlinked */
    int32_t merged;     /* what that pair becomes */
};
#define NO_RANK UINT32_MAX

static bool reserve(struct bpe_scratch *s, size_t n) {
    /* Every merge adds at most two heap entries, and there are at most n - 1 merges. */
    if (n > s->cap) {
        void *symbols = realloc(s->symbols, n * sizeof *s->symbols);
        if (!symbols) return false;
        s->symbols = symbols;
        s->cap = n;
    }
    if (3 * n > s->heap_cap) {
        void *heap = realloc(s->heap, 3 * n * sizeof *s->heap);
        if (!heap) return false;
        s->heap = heap;
        s->heap_cap = 3 * n;
    }
    return true;
}

/* A binary min-heap of rank << 32 | position: order by rank, then from the left. */
static void heap_push(uint64_t *heap, size_t *n, uint64_t entry) {
    size_t i = (*n)++;
    while (i > 0 && heap[(i - 1) / 2] > entry) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = entry;
}

static uint64_t heap_pop(uint64_t *heap, size_t *n) {
    uint64_t top = heap[0], last = heap[--*n];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= *n) break;
        if (child + 1 < *n && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= last) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return top;
}

/* Looks up the pair that starts at i and queues it if it merges. */
static void queue_pair(const struct bpe_table *t, struct bpe_scratch *s, size_t *n_heap,
                       int32_t i) {
    struct bpe_symbol *a = &s->symbols[i];
    a->rank = NO_RANK;
    if (a->next < 0) return;
    const struct bpe_merge *m = &t->slots[slot_of(t, pair_of(a->id, s->symbols[a->next].id))];
    if (m->pair == BPE_NO_PAIR) return;
    a->rank = m->rank;
    a->merged = m->id;
    heap_push(s->heap, n_heap, (uint64_t)m->rank << 32 | (uint32_t)i);
}

/* Each merge costs a constant number of look-ups and heap steps, and unlinks one symbol: n log n.
 */
size_t bpe_merge_ids(const struct bpe_table *t, struct bpe_scratch *s, int32_t *ids, size_t n) {
    if (n < 2) return n;
    if (n > INT32_MAX / 4 || !reserve(s, n)) return 0;
    size_t n_heap = 0;
    for (size_t i = 0; i < n; i++) {
        s->symbols[i] = (struct bpe_symbol){.id = ids[i],
                                            .prev = (int32_t)i - 1,
                                            .next = i + 1 < n ? (int32_t)i + 1 : -1,
                                            .rank = NO_RANK};
    }
    for (size_t i = 0; i < n; i++) queue_pair(t, s, &n_heap, (int32_t)i);

    while (n_heap > 0) {
        uint64_t top = heap_pop(s->heap, &n_heap);
        int32_t i = (int32_t)(top & UINT32_MAX);
        struct bpe_symbol *a = &s->symbols[i];
        /* A rank names its pair, so an entry whose rank is no longer the one at its position was
         * overtaken by another merge. */
        if (a->rank == NO_RANK || a->rank != top >> 32) continue;
        struct bpe_symbol *b = &s->symbols[a->next];
        a->id = a->merged;
        a->next = b->next;
        b->rank = NO_RANK;
        if (a->next >= 0) s->symbols[a->next].prev = i;
        queue_pair(t, s, &n_heap, i);
        if (a->prev >= 0) queue_pair(t, s, &n_heap, a->prev);
    }
    size_t left = 0;
    for (int32_t i = 0; i >= 0; i = s->symbols[i].next) ids[left++] = s->symbols[i].id;
    return left;
}
