#include "ckpt/parallel.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

enum { MAX_THREADS = 64 };

struct job {
    size_t n;
    atomic_size_t next;
    int (*item)(void *arg, size_t i, lily_err *err);
    int (*tick)(void *arg, lily_err *err);
    void *arg;
    atomic_int rc;
    pthread_mutex_t lock; /* of err, and of the first change of rc */
    lily_err err;
};

static void stop(struct job *j, int rc, const lily_err *err) {
    pthread_mutex_lock(&j->lock);
    if (atomic_load(&j->rc) == 0) {
        j->err = *err;
        atomic_store(&j->rc, rc);
    }
    pthread_mutex_unlock(&j->lock);
}

static void work(struct job *j, bool ticks) {
    lily_err err = {0};
    while (atomic_load(&j->rc) == 0) {
        size_t i = atomic_fetch_add(&j->next, 1);
        if (i >= j->n) break;
        int rc = j->item(j->arg, i, &err);
        if (rc == 0 && ticks && j->tick) rc = j->tick(j->arg, &err);
        if (rc != 0) stop(j, rc, &err);
    }
}

static void *worker(void *arg) {
    work(arg, false);
    return NULL;
}

int parallel_threads(void) {
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : (int)n;
}

int parallel_for(size_t n, int (*item)(void *arg, size_t i, lily_err *err),
                 int (*tick)(void *arg, lily_err *err), void *arg, lily_err *err) {
    struct job j = {.n = n, .item = item, .tick = tick, .arg = arg};
    pthread_mutex_init(&j.lock, NULL);
    size_t others = (size_t)parallel_threads() - 1;
    if (n <= others) others = n > 0 ? n - 1 : 0;
    pthread_t thread[MAX_THREADS];
    size_t started = 0;
    /* Where no further thread can be had, those that run do all the work. */
    while (started < others && pthread_create(&thread[started], NULL, worker, &j) == 0) started++;
    work(&j, true);
    for (size_t i = 0; i < started; i++) pthread_join(thread[i], NULL);
    /* Once more when all is done, however few pieces the calling thread came to take itself. */
    lily_err last = {0};
    int stopped = tick && atomic_load(&j.rc) == 0 ? tick(arg, &last) : 0;
    if (stopped != 0) stop(&j, stopped, &last);
    pthread_mutex_destroy(&j.lock);
    int rc = atomic_load(&j.rc);
    if (rc != 0 && err) *err = j.err;
    return rc;
}
