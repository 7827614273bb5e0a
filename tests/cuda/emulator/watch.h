/* Who touched which memory of the emulated card, and whether something ordered it: kernels that
 * were compiled to tell of every access (g++ -fsanitize=thread, with watch.cpp in the place of its
 * library) are held to what a card promises and no more. */
#ifndef LILY_CUDA_WATCH_H
#define LILY_CUDA_WATCH_H

#include <cstddef>
#include <cstdint>

namespace emulator {

/* The running thread's place in time; the fibers keep it. */
struct Moment {
    uint32_t launch;   /* number of this launch, from 1; 0: between launches */
    uint32_t plain;    /* the newest one that began only when all before it had ended */
    uint32_t block;    /* of the grid */
    uint32_t barriers; /* that the block has passed */
    uint32_t meetings; /* that the thread's warp has had: exchanges */
    uint16_t thread;
    bool early;  /* the launch may begin before the one before it has ended */
    bool waited; /* ... and this thread has waited until it has */
};
extern Moment moment;
extern const char *running; /* the kernel */

/* Memory to watch, of_block: each block's own; whole pages. Without watch.cpp nothing is. */
extern void (*watch_memory)(const void *at, size_t bytes, bool of_block);
extern void (*watch_access)(const void *at, size_t bytes, bool write, const void *pc);

size_t watch_reports(); /* accesses reported so far; forgets them (watch.cpp) */

} // namespace emulator

#endif
