/* State checkpoints of one session: copies of the recurrent and convolution state at positions of
 * its token sequence, from which an edited prompt resumes. The KV cache is per position and needs
 * no copy; this state is the part that cannot be taken back (63 MB for the real model). The copies
 * lie where the backend likes them best, a GPU's in its own memory.
 *
 * Invariant: every checkpoint was taken at its position of the session's present tokens. The
 * session keeps it by calling states_drop_above before it changes a token. */
#ifndef LILY_ENGINE_STATES_H
#define LILY_ENGINE_STATES_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"
#include "engine/state_file.h"

enum { STATES_MAX = STATE_FILE_PLACES };

struct state {
    int32_t pos;
    bool decode;                 /* taken while generating: only the last two of these are kept */
    struct backend_state *saved; /* NULL: on disk, */
    int32_t place;               /* there */
};

struct states {
    const struct backend *backend;
    struct backend_model *model;
    int32_t limit;                  /* checkpoints there is memory for, */
    int32_t wanted;                 /* at most so many, at most STATES_MAX */
    int32_t n, on_disk;             /* taken; of them not in memory */
    struct state entry[STATES_MAX]; /* [n] by ascending position */
    struct backend_state
        *spare[STATES_MAX]; /* [n_spare] not taken; n - on_disk + n_spare = limit */
    int32_t n_spare;
    struct state_file file;
};

/* Reserves the memory of as many checkpoints as budget bytes hold (fewer where the backend gives
 * less), so that none is allocated while tokens are decoded. In ordinary memory one is not touched
 * until it is taken, which on common systems means that it is not used either. */
void states_init(struct states *s, const struct backend *b, struct backend_model *m,
                 uint64_t budget);
void states_free(struct states *s);
void states_clear(struct states *s); /* forgets all, keeps the memory */

/* Gives back the memory of all but `keep` checkpoints, until states_regain. Those taken go to disk,
 * or where that fails are dropped; the ones at the highest positions stay. Returns for how many
 * there is room less. */
int32_t states_give_back(struct states *s, int32_t keep);

/* Reserves again what was given back, as far as there is memory. */
void states_regain(struct states *s);

void states_drop_above(struct states *s, int32_t pos);

/* The checkpoint nearest to pos at or below it, or NULL. */
const struct state *states_find(const struct states *s, int32_t pos);
/* Takes a session there. One on disk is read into memory of its own for the time of the call. */
int states_restore(const struct states *s, const struct state *from,
                   struct backend_session *session, lily_err *err);

/* Room for a checkpoint at pos, to be filled by the caller before the next call, or NULL: there is
 * one already, or no budget. When all are taken the one goes whose loss costs least, the
 * nearest to its predecessor; of those in keep[n_keep] none for a decode checkpoint, and for others
 * only if nothing else is left. */
struct backend_state *states_add(struct states *s, int32_t pos, bool decode, const int32_t *keep,
                                 int32_t n_keep);
void states_remove(struct states *s, int32_t pos); /* the caller could not fill it */

#endif
