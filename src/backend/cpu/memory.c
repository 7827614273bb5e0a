#include "backend/cpu/memory.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGN = 128 };

void *pages_new(size_t size) {
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
#ifdef MADV_HUGEPAGE
    madvise(p, size, MADV_HUGEPAGE); /* advice: failing costs speed only */
#endif
    return p;
}

void pages_free(void *p, size_t size) {
    if (p) munmap(p, size);
}

uint64_t memory_limit(void) {
    uint64_t limit = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
#ifdef __linux__
    FILE *f = fopen("/sys/fs/cgroup/memory.max", "r");
    unsigned long long cap;
    if (f) {
        if (fscanf(f, "%llu", &cap) == 1 && cap < limit) limit = cap; /* "max": no number */
        fclose(f);
    }
#endif
    return limit;
}

uint64_t memory_available(void) {
    uint64_t limit = memory_limit();
#ifdef __linux__
    FILE *f = fopen("/proc/meminfo", "r");
    char line[128];
    unsigned long long kb;
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "MemAvailable: %llu kB", &kb) != 1) continue;
        if (kb * 1024 < limit) limit = kb * 1024;
        break;
    }
    if (f) fclose(f);
#endif
    return limit;
}

void *carve(struct carver *c, size_t count, size_t size) {
    size_t at = c->used;
    c->used += (count * size + ALIGN - 1) / ALIGN * ALIGN;
    return c->base ? c->base + at : NULL;
}
