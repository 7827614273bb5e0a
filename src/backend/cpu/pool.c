#include "backend/cpu/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#ifdef __APPLE__
#include <sys/sysctl.h>
#endif

enum {
    /* Polls before a thread sleeps, 10 to 20 ns each. At a barrier the others are a few
     * microseconds away unless something else runs on their processor; between steps the host
     * samples. */
    SPINS_IN_STEP = 4000,
    SPINS_IDLE = 20000,
    LINE = 128, /* keeps the two hot words on lines of their own */
    MAX_THREADS = 1024
};

struct worker {
    struct cpu_pool *pool;
    pthread_t id;
    int32_t index;
};

struct cpu_pool {
    int32_t threads;
    int32_t started; /* workers running */
    cpu_pool_fn fn;
    void *arg;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Alignas(LINE) atomic_uint step;   /* counts cpu_pool_run calls; workers poll it */
    _Alignas(LINE) atomic_int arrived; /* threads at the current barrier */
    _Alignas(LINE) atomic_uint phase;  /* counts barriers passed */
    _Alignas(LINE) atomic_int sleepers;
    atomic_bool stop;
    struct worker worker[];
};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Waits until *word leaves value: spinning first, then asleep. */
static void await(struct cpu_pool *p, atomic_uint *word, unsigned value, int spins) {
    for (int i = 0; i < spins; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value) return;
        relax();
    }
    pthread_mutex_lock(&p->lock);
    /* Announced before the last look, as advance counts the word up before it looks for sleepers:
     * one of the two sees the other. */
    atomic_fetch_add(&p->sleepers, 1);
    while (atomic_load(word) == value) pthread_cond_wait(&p->wake, &p->lock);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->lock);
}

/* Counts *word up and wakes whoever sleeps. */
static void advance(struct cpu_pool *p, atomic_uint *word) {
    atomic_fetch_add(word, 1);
    if (atomic_load(&p->sleepers) == 0) return;
    pthread_mutex_lock(&p->lock);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->lock);
}

void cpu_pool_barrier(struct cpu_pool *p) {
    unsigned phase = atomic_load_explicit(&p->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&p->arrived, 1, memory_order_acq_rel) == p->threads - 1) {
        atomic_store_explicit(&p->arrived, 0, memory_order_relaxed);
        advance(p, &p->phase);
    } else {
        await(p, &p->phase, phase, SPINS_IN_STEP);
    }
}

static void *worker_main(void *arg) {
    struct worker *w = arg;
    struct cpu_pool *p = w->pool;
    for (unsigned seen = 0;; seen++) {
        await(p, &p->step, seen, SPINS_IDLE);
        if (atomic_load(&p->stop)) return NULL;
        p->fn(p->arg, w->index, p->threads);
        cpu_pool_barrier(p);
    }
}

void cpu_pool_run(struct cpu_pool *p, cpu_pool_fn fn, void *arg) {
    p->fn = fn;
    p->arg = arg;
    advance(p, &p->step);
    fn(arg, 0, p->threads);
    cpu_pool_barrier(p);
}

int32_t cpu_pool_threads(const struct cpu_pool *p) {
    return p->threads;
}

void cpu_pool_free(struct cpu_pool *p) {
    if (!p) return;
    atomic_store(&p->stop, true);
    advance(p, &p->step);
    for (int32_t i = 0; i < p->started; i++) pthread_join(p->worker[i].id, NULL);
    pthread_cond_destroy(&p->wake);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

int cpu_pool_new(int32_t threads, struct cpu_pool **out, lily_err *err) {
    *out = NULL;
    if (threads < 1 || threads > MAX_THREADS) {
        return ERR(err, LILY_EINVAL, "threads: found %d, expected 1 to %d", threads, MAX_THREADS);
    }
    size_t size = sizeof(struct cpu_pool) + (size_t)threads * sizeof(struct worker);
    size = (size + LINE - 1) / LINE * LINE;
    struct cpu_pool *p = aligned_alloc(LINE, size);
    if (!p) return ERR_NOMEM(err, "thread pool");
    p->threads = threads;
    p->started = 0;
    p->fn = NULL;
    p->arg = NULL;
    atomic_init(&p->step, 0);
    atomic_init(&p->arrived, 0);
    atomic_init(&p->phase, 0);
    atomic_init(&p->sleepers, 0);
    atomic_init(&p->stop, false);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->wake, NULL);
    for (int32_t i = 0; i < threads - 1; i++) {
        p->worker[i] = (struct worker){.pool = p, .index = i + 1};
        int e = pthread_create(&p->worker[i].id, NULL, worker_main, &p->worker[i]);
        if (e != 0) {
            cpu_pool_free(p);
            return ERR(err, err_from_errno(e),
                       "threads: could start %d of %d; ask for fewer with --threads", i + 1,
                       threads);
        }
        p->started++;
    }
    *out = p;
    return 0;
}

#ifdef __linux__
/* The first CPU of the list in a thread_siblings_list file, or cpu itself. */
static int first_sibling(int cpu) {
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    FILE *f = fopen(path, "r");
    if (!f) return cpu;
    int first = cpu;
    if (fscanf(f, "%d", &first) != 1) first = cpu;
    fclose(f);
    return first;
}

/* Processors a container may keep busy (cgroup v2 cpu.max), 0: no limit. */
static int32_t quota_cores(void) {
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "r");
    if (!f) return 0;
    long quota = 0, period = 0;
    int n = fscanf(f, "%ld %ld", &quota, &period); /* "max 100000": no number, no limit */
    fclose(f);
    return n == 2 && quota > 0 && period > 0 ? (int32_t)((quota + period - 1) / period) : 0;
}

int32_t cpu_pool_physical_cores(void) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
    int32_t cores = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed)) continue;
        int first = first_sibling(cpu);
        /* A sibling counts when the first of its core is not ours to use. */
        if (first == cpu || first < 0 || first >= CPU_SETSIZE || !CPU_ISSET(first, &allowed)) {
            cores++;
        }
    }
    int32_t quota = quota_cores();
    if (quota > 0 && quota < cores) cores = quota;
    return cores > 0 ? cores : 1;
}
#else
int32_t cpu_pool_physical_cores(void) {
#ifdef __APPLE__
    /* Efficiency cores would hold every barrier up: count the fast ones where they are named. */
    int32_t n = 0;
    size_t size = sizeof n;
    if (sysctlbyname("hw.perflevel0.physicalcpu", &n, &size, NULL, 0) == 0 && n > 0) return n;
    if (sysctlbyname("hw.physicalcpu", &n, &size, NULL, 0) == 0 && n > 0) return n;
#endif
    return 1;
}
#endif
