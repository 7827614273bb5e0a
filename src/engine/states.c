#include "engine/states.h"

#include <string.h>

enum { DECODE_KEPT = 2 };

void states_init(struct states *s, const struct backend *b, struct backend_model *m,
                 uint64_t budget) {
    *s = (struct states){.backend = b};
    size_t bytes = b->state_bytes(m);
    uint64_t n = bytes ? budget / bytes : 0;
    lily_err err; /* fewer checkpoints cost time only */
    if (n > STATES_MAX) n = STATES_MAX;
    while ((uint64_t)s->n_spare < n && !b->state_new(m, &s->spare[s->n_spare], &err)) s->n_spare++;
    s->limit = s->n_spare;
}

void states_clear(struct states *s) {
    for (int32_t i = 0; i < s->n; i++) s->spare[s->n_spare++] = s->entry[i].saved;
    s->n = 0;
}

void states_free(struct states *s) {
    states_clear(s);
    for (int32_t i = 0; i < s->n_spare; i++) s->backend->state_free(s->spare[i]);
    s->n_spare = 0;
}

static void drop(struct states *s, int32_t i) {
    s->spare[s->n_spare++] = s->entry[i].saved;
    s->n--;
    memmove(s->entry + i, s->entry + i + 1, (size_t)(s->n - i) * sizeof *s->entry);
}

int32_t states_give_back(struct states *s, int32_t keep) {
    int32_t limit = s->limit;
    while (s->n > keep) drop(s, 0);
    for (; s->n_spare > 0 && s->limit > keep; s->limit--) {
        s->backend->state_free(s->spare[--s->n_spare]);
    }
    return limit - s->limit;
}

void states_drop_above(struct states *s, int32_t pos) {
    while (s->n && s->entry[s->n - 1].pos > pos) drop(s, s->n - 1);
}

const struct state *states_find(const struct states *s, int32_t pos) {
    for (int32_t i = s->n - 1; i >= 0; i--) {
        if (s->entry[i].pos <= pos) return &s->entry[i];
    }
    return NULL;
}

void states_remove(struct states *s, int32_t pos) {
    for (int32_t i = 0; i < s->n; i++) {
        if (s->entry[i].pos == pos) {
            drop(s, i);
            return;
        }
    }
}

/* Without checkpoint i a prompt that forks just after it is read again from the one before. */
static int32_t loss(const struct states *s, int32_t i) {
    return s->entry[i].pos - (i ? s->entry[i - 1].pos : 0);
}

static bool listed(const int32_t *list, int32_t n, int32_t pos) {
    for (int32_t i = 0; i < n; i++) {
        if (list[i] == pos) return true;
    }
    return false;
}

/* Makes room; false when every checkpoint is worth more than the new one. */
static bool evict(struct states *s, bool for_decode, const int32_t *keep, int32_t n_keep) {
    int32_t victim = -1;
    for (int pass = 0; victim < 0; pass++) { /* the second pass spares none */
        if (pass == 1 && for_decode) return false;
        for (int32_t i = 0; i < s->n; i++) {
            if (pass == 0 && listed(keep, n_keep, s->entry[i].pos)) continue;
            if (victim < 0 || loss(s, i) < loss(s, victim)) victim = i;
        }
    }
    drop(s, victim);
    return true;
}

struct backend_state *states_add(struct states *s, int32_t pos, bool decode, const int32_t *keep,
                                 int32_t n_keep) {
    int32_t oldest_decode = -1, n_decode = 0;
    if (s->limit == 0) return NULL;
    for (int32_t i = s->n - 1; i >= 0; i--) {
        if (s->entry[i].pos == pos) return NULL;
        if (!s->entry[i].decode) continue;
        n_decode++;
        oldest_decode = i;
    }
    if (decode && n_decode >= DECODE_KEPT) {
        drop(s, oldest_decode);
    } else if (s->n == s->limit && !evict(s, decode, keep, n_keep)) {
        return NULL;
    }
    struct backend_state *saved = s->spare[--s->n_spare];
    int32_t at = s->n;
    while (at > 0 && s->entry[at - 1].pos > pos) at--;
    memmove(s->entry + at + 1, s->entry + at, (size_t)(s->n - at) * sizeof *s->entry);
    s->entry[at] = (struct state){.pos = pos, .decode = decode, .saved = saved};
    s->n++;
    return saved;
}
