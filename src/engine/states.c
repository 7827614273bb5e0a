#include "engine/states.h"

#include <string.h>

enum { DECODE_KEPT = 2 };

void states_init(struct states *s, const struct backend *b, struct backend_model *m,
                 uint64_t budget) {
    *s = (struct states){.backend = b, .model = m};
    size_t bytes = b->state_bytes(m);
    uint64_t n = bytes ? budget / bytes : 0;
    lily_err err; /* fewer checkpoints cost time only */
    if (n > STATES_MAX) n = STATES_MAX;
    while ((uint64_t)s->n_spare < n && !b->state_new(m, &s->spare[s->n_spare], &err)) s->n_spare++;
    s->limit = s->wanted = s->n_spare;
    state_file_init(&s->file, bytes);
}

static void drop(struct states *s, int32_t i) {
    if (s->entry[i].saved) {
        s->spare[s->n_spare++] = s->entry[i].saved;
    } else {
        state_file_drop(&s->file, s->entry[i].place);
        s->on_disk--;
    }
    s->n--;
    memmove(s->entry + i, s->entry + i + 1, (size_t)(s->n - i) * sizeof *s->entry);
}

void states_clear(struct states *s) {
    while (s->n > 0) drop(s, s->n - 1);
}

void states_free(struct states *s) {
    if (!s->backend) return;
    states_clear(s);
    for (int32_t i = 0; i < s->n_spare; i++) s->backend->state_free(s->spare[i]);
    s->n_spare = 0;
    state_file_close(&s->file);
}

static void move_to_disk(struct states *s, int32_t i) {
    struct state *e = &s->entry[i];
    lily_err err; /* a checkpoint less costs time only */
    if (state_file_put(&s->file, s->backend, e->saved, &e->place, &err)) {
        drop(s, i);
        return;
    }
    s->spare[s->n_spare++] = e->saved;
    e->saved = NULL;
    s->on_disk++;
}

int32_t states_give_back(struct states *s, int32_t keep) {
    int32_t limit = s->limit;
    for (int32_t i = 0; s->n - s->on_disk > keep;) {
        if (s->entry[i].saved) {
            move_to_disk(s, i);
        } else {
            i++;
        }
    }
    for (; s->n_spare > 0 && s->limit > keep; s->limit--) {
        s->backend->state_free(s->spare[--s->n_spare]);
    }
    return limit - s->limit;
}

void states_regain(struct states *s) {
    lily_err err;
    while (s->limit < s->wanted && !s->backend->state_new(s->model, &s->spare[s->n_spare], &err)) {
        s->n_spare++;
        s->limit++;
    }
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

int states_restore(const struct states *s, const struct state *from,
                   struct backend_session *session, lily_err *err) {
    const struct backend *b = s->backend;
    struct backend_state *read = NULL;
    if (from->saved) return b->state_restore(session, from->saved, from->pos, err);
    int rc = b->state_new(s->model, &read, err);
    if (rc) return rc;
    rc = state_file_get(&s->file, b, from->place, read, err);
    if (!rc) rc = b->state_restore(session, read, from->pos, err);
    b->state_free(read);
    return rc;
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
            if (!s->entry[i].saved) continue; /* it has no memory to give */
            if (pass == 0 && listed(keep, n_keep, s->entry[i].pos)) continue;
            if (victim < 0 || loss(s, i) < loss(s, victim)) victim = i;
        }
    }
    drop(s, victim);
    return true;
}

/* The oldest of those on disk. */
static void drop_from_disk(struct states *s) {
    int32_t i = 0;
    while (s->entry[i].saved) i++;
    drop(s, i);
}

struct backend_state *states_add(struct states *s, int32_t pos, bool decode, const int32_t *keep,
                                 int32_t n_keep) {
    int32_t oldest = 0, n_decode = 0;
    bool in_memory = false; /* the oldest one of decode is, so that its memory is to be had */
    if (s->limit == 0) return NULL;
    for (int32_t i = s->n - 1; i >= 0; i--) {
        if (s->entry[i].pos == pos) return NULL;
        if (!s->entry[i].decode) continue;
        n_decode++;
        oldest = s->entry[i].pos;
        in_memory = s->entry[i].saved != NULL;
    }
    bool replaces = decode && n_decode >= DECODE_KEPT;
    bool room = s->n_spare > 0 || (replaces && in_memory);
    if (!room && !evict(s, decode, keep, n_keep)) return NULL;
    if (replaces) states_remove(s, oldest);
    if (s->n == STATES_MAX) drop_from_disk(s);
    struct backend_state *saved = s->spare[--s->n_spare];
    int32_t at = s->n;
    while (at > 0 && s->entry[at - 1].pos > pos) at--;
    memmove(s->entry + at + 1, s->entry + at, (size_t)(s->n - at) * sizeof *s->entry);
    s->entry[at] = (struct state){.pos = pos, .decode = decode, .saved = saved};
    s->n++;
    return saved;
}
