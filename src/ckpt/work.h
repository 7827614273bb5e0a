/* Progress of parallel work, and its cancellation: pieces add bytes from any thread, the calling
 * thread reports them. */
#ifndef LILY_CKPT_WORK_H
#define LILY_CKPT_WORK_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/err.h"

struct work {
    int (*progress)(void *arg, uint64_t done, uint64_t total); /* may be NULL */
    void *arg;
    uint64_t total;
    _Atomic uint64_t done;
};

static inline void work_add(struct work *w, uint64_t bytes) {
    if (w) atomic_fetch_add(&w->done, bytes);
}

/* Reports to the caller's function; LILY_ECANCELED when that asks to stop. */
static inline int work_report(struct work *w, lily_err *err) {
    if (!w || !w->progress || w->progress(w->arg, atomic_load(&w->done), w->total) == 0) return 0;
    return ERR(err, LILY_ECANCELED, "checkpoint: interrupted; nothing was kept");
}

#endif
