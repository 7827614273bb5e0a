/* The fibers of the emulated card, and its driver: the functions of driver.h that a program finds
 * in itself (cuda_driver_open_from(NULL)). Memory of the card is the program's own, a stream does
 * its work at once. x86-64. */
#include "emulator.h"
#include "backend/cuda/driver.h"
#include "watch.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <sys/mman.h>
#include <vector>

extern "C" void emulator_switch(void **save, void *to);
/* Keeps what a callee must keep by the System V convention and goes on at the other stack. */
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
.type emulator_switch,@function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

namespace emulator {

Context *context;
Moment moment;
const char *running = "";
static void no_memory(const void *, size_t, bool) {}
static void no_access(const void *, size_t, bool, const void *) {}
void (*watch_memory)(const void *, size_t, bool) = no_memory;
void (*watch_access)(const void *, size_t, bool, const void *) = no_access;

namespace {

enum State { READY, EXCHANGE, BARRIER, ASIDE, DONE };
enum { STACK = 256 << 10, MOST_THREADS = 1024, SHARED_BYTES = 228 << 10, MOST_TURNS = 1 << 20 };

struct Copy {
    void *to;
    const void *from;
    bool valid;
};
struct Fiber {
    Context context;
    State state;
    void *stack;
    std::vector<Copy> open;                 /* not yet committed */
    std::vector<std::vector<Copy>> pending; /* groups, oldest first */
    int given;
    uint32_t meetings; /* exchanges so far */
    bool waited;       /* for the launch before */
};
struct Kernel {
    void (*run)(void **, const void *);
    const void *kernel;
};

/* Kernels add themselves before main. */
std::map<std::string, Kernel> &kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}
std::vector<Fiber> fibers(MOST_THREADS);
std::vector<char> staged(MOST_THREADS *EXCHANGE_BYTES), exchanged(MOST_THREADS *EXCHANGE_BYTES);
char *shared_end; /* dynamic shared memory ends here, before a page that faults */
char *stacks;
void *scheduler;
Fiber *current;
unsigned n_threads;
size_t shared_bytes; /* of this launch */
int or_result;
const Kernel *kernel;
void **arguments;
bool has_waited;   /* some thread of this launch, for the one before */
uint64_t seed = 1; /* of the order in which warps run */

/* Memory with 64 KB behind it that fault. size is a multiple of a page. */
char *guarded(size_t size) {
    enum { PAGE = 64 << 10 };
    void *p = mmap(nullptr, size + PAGE, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mprotect((char *)p + size, PAGE, PROT_NONE)) abort();
    return (char *)p;
}

[[noreturn]] void die(const char *what) {
    fprintf(stderr, "emulated card: kernel %s: %s\n", running, what);
    abort();
}

void leave(State state) {
    current->state = state;
    emulator_switch(&current->stack, scheduler);
}

void fiber_main() {
    kernel->run(arguments, kernel->kernel);
    if (!current->open.empty() || !current->pending.empty()) copy_wait(0);
    leave(DONE);
    abort();
}

void prepare(unsigned i) {
    Fiber &f = fibers[i];
    f.state = READY;
    f.meetings = 0;
    f.waited = false;
    f.open.clear();
    f.pending.clear();
    void **top = (void **)(stacks + (size_t)(i + 1) * STACK - 64);
    *--top = nullptr;
    *--top = (void *)fiber_main;
    for (int k = 0; k < 6; k++) *--top = nullptr;
    f.stack = top;
}

void resume(unsigned i) {
    current = &fibers[i];
    context = &current->context;
    moment.thread = (uint16_t)i;
    moment.meetings = current->meetings;
    moment.waited = current->waited;
    emulator_switch(&scheduler, current->stack);
}

/* Until every lane waits at a barrier or is done. */
void run_warp(unsigned first) {
    unsigned end = first + 32 < n_threads ? first + 32 : n_threads;
    for (;;) {
        for (unsigned i = first; i < end; i++) {
            if (fibers[i].state == READY) resume(i);
        }
        unsigned waiting = 0, aside = 0;
        for (unsigned i = first; i < end; i++) {
            waiting += fibers[i].state == EXCHANGE;
            aside += fibers[i].state == ASIDE;
        }
        if (!waiting || aside) return;
        if (waiting != end - first || waiting != 32) {
            die("an exchange that some lanes do not reach");
        }
        memcpy(&exchanged[first * EXCHANGE_BYTES], &staged[first * EXCHANGE_BYTES],
               32 * EXCHANGE_BYTES);
        for (unsigned i = first; i < end; i++) {
            fibers[i].state = READY;
            fibers[i].meetings++;
        }
    }
}

/* One block; warps run in a random order between barriers, so that a missing barrier shows. */
void run_block(const dim3 &block, const dim3 &size, const dim3 &grid) {
    /* NaN: nothing may be read before it is written. */
    memset(shared_end - shared_bytes, 0xff, shared_bytes);
    for (unsigned i = 0; i < n_threads; i++) {
        prepare(i);
        fibers[i].context = {{i, 0, 0}, block, size, grid};
    }
    unsigned warps = (n_threads + 31) / 32, idle = 0;
    for (;;) {
        unsigned order[32];
        for (unsigned i = 0; i < warps; i++) order[i] = i;
        for (unsigned i = warps; i > 1; i--) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            std::swap(order[i - 1], order[(seed >> 33) % i]);
        }
        for (unsigned i = 0; i < warps; i++) run_warp(order[i] * 32);
        bool aside = false;
        for (unsigned i = 0; i < n_threads; i++) {
            if (fibers[i].state != ASIDE) continue;
            fibers[i].state = READY;
            aside = true;
        }
        if (aside) {
            if (++idle > MOST_TURNS) die("a signal that is never given");
            continue;
        }
        unsigned waiting = 0;
        or_result = 0;
        for (unsigned i = 0; i < n_threads; i++) {
            waiting += fibers[i].state == BARRIER;
            or_result |= fibers[i].given;
            fibers[i].given = 0;
        }
        if (!waiting) break;
        if (waiting != n_threads) die("a barrier that some threads do not reach");
        moment.barriers++;
        for (unsigned i = 0; i < n_threads; i++) fibers[i].state = READY;
    }
    moment.block++;
    moment.barriers = 0;
}

} // namespace

size_t most_shared = 99 << 10;

int lane() {
    return (int)(context->thread.x % 32);
}
char *dynamic_shared() {
    return shared_end - shared_bytes;
}
void copy_later(void *to, const void *from, bool valid) {
    if (valid) watch_access(from, 16, false, __builtin_return_address(0));
    watch_access(to, 16, true, __builtin_return_address(0));
    current->open.push_back({to, from, valid});
}
void copy_commit() {
    current->pending.push_back(std::move(current->open));
    current->open.clear();
}
void copy_wait(int most) {
    std::vector<std::vector<Copy>> &p = current->pending;
    while ((int)p.size() > most) {
        for (const Copy &c : p.front()) {
            watch_access(c.to, 16, true, __builtin_return_address(0));
            if (c.valid)
                memcpy(c.to, c.from, 16);
            else
                memset(c.to, 0, 16);
        }
        p.erase(p.begin());
    }
}
void wait_for_previous() {
    current->waited = moment.waited = has_waited = true;
}
void unwatched() {
    moment.launch = 0;
}
void barrier() {
    leave(BARRIER);
}
void give_way() {
    leave(ASIDE);
}
int *barrier_or(int value) {
    current->given = value;
    leave(BARRIER);
    return &or_result;
}
const char *exchange_bytes(const void *mine, size_t size) {
    size_t own = (size_t)(current - &fibers[0]);
    memcpy(&staged[own * EXCHANGE_BYTES], mine, size);
    leave(EXCHANGE);
    return &exchanged[own / 32 * 32 * EXCHANGE_BYTES];
}
void add_kernel(const char *file, const char *name, void (*run)(void **, const void *),
                const void *function) {
    kernels()[std::string(file) + "/" + name] = {run, function};
}

} // namespace emulator

using namespace emulator;

extern "C" {

int cuInit(unsigned) {
    return 0;
}
int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}
int cuDeviceGetCount(int *n) {
    *n = 1;
    return 0;
}
int cuDeviceGet(int *device, int) {
    *device = 0;
    return 0;
}
int cuDeviceGetName(char *name, int size, int) {
    snprintf(name, (size_t)size, "emulated card");
    return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = (size_t)8 << 30;
    return 0;
}
/* 80, or 90: weights lie as tiles, and with so few multiprocessors the portable kernels and those
 * of batches read them (tests/cuda/main.c). */
int emulated_capability = 80;
static int shared_limit() {
    return emulated_capability == 90 ? 227 << 10 : 99 << 10;
}
int cuDeviceGetAttribute(int *value, int attribute, int) {
    *value = attribute == CU_MULTIPROCESSORS          ? 4
             : attribute == CU_CAPABILITY_MAJOR       ? emulated_capability / 10
             : attribute == CU_CAPABILITY_MINOR       ? emulated_capability % 10
             : attribute == CU_SHARED_PER_BLOCK_OPTIN ? shared_limit()
                                                      : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **out, int) {
    *out = (void *)1;
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int) {
    return 0;
}
int cuCtxSetCurrent(void *) {
    return 0;
}
int cuGetErrorName(int, const char **text) {
    *text = "error";
    return 0;
}
int cuGetErrorString(int, const char **text) {
    *text = "of the emulated card";
    return 0;
}
/* The image is a name, "shape/file". */
int cuModuleLoadData(void **module, const void *image) {
    *module = (void *)image;
    return 0;
}
int cuModuleUnload(void *) {
    return 0;
}
int cuModuleGetFunction(void **out, void *module, const char *name) {
    auto found = kernels().find(std::string((const char *)module) + "/" + name);
    if (found == kernels().end()) return 500;
    *out = (void *)&*found;
    return 0;
}
int cuFuncSetAttribute(void *, int, int) {
    return 0;
}
int cuFuncGetAttribute(int *value, int, void *) {
    *value = 0;
    return 0;
}
int cuCtxSetLimit(int, size_t) {
    return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *, int, size_t) {
    *blocks = 1;
    return 0;
}
int cuMemGetInfo_v2(size_t *available, size_t *total) {
    *available = *total = (size_t)8 << 30;
    return 0;
}
/* Filled with NaN: nothing may be read before it is written. */
int cuMemAlloc_v2(uint64_t *out, size_t bytes) {
    bytes = (bytes + 4095) / 4096 * 4096; /* no page is of two */
    void *p = aligned_alloc(4096, bytes);
    if (!p) return 2;
    memset(p, 0xff, bytes);
    watch_memory(p, bytes, false);
    *out = (uint64_t)(uintptr_t)p;
    return 0;
}
int cuMemFree_v2(uint64_t p) {
    free((void *)p);
    return 0;
}
int cuMemHostAlloc(void **out, size_t bytes, unsigned) {
    *out = calloc(1, bytes);
    return *out ? 0 : 2;
}
int cuMemFreeHost(void *p) {
    free(p);
    return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *) {
    memcpy((void *)to, from, bytes);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *) {
    memcpy(to, (const void *)from, bytes);
    return 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *) {
    memcpy((void *)to, (const void *)from, bytes);
    return 0;
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void *) {
    memset((void *)to, value, bytes);
    return 0;
}
int cuStreamCreate(void **out, unsigned) {
    *out = (void *)1;
    return 0;
}
int cuStreamDestroy_v2(void *) {
    return 0;
}
int cuStreamSynchronize(void *) {
    return 0;
}
int cuEventCreate(void **out, unsigned) {
    *out = (void *)1;
    return 0;
}
int cuEventDestroy_v2(void *) {
    return 0;
}
int cuEventRecord(void *, void *) {
    return 0;
}
int cuEventSynchronize(void *) {
    return 0;
}
static bool begins_early; /* the launch under way */
static uint32_t launches;
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned bytes, void *, void **args, void **) {
    auto *found = (std::pair<const std::string, Kernel> *)function;
    size_t most = most_shared > (size_t)shared_limit() ? most_shared : (size_t)shared_limit();
    if (by != 1 || bz != 1 || bx > MOST_THREADS || bytes > most || !gx || !gy || !gz) return 1;
    if (!stacks) {
        stacks = guarded((size_t)STACK * MOST_THREADS);
        shared_end = guarded(SHARED_BYTES) + SHARED_BYTES;
        watch_memory(shared_end - SHARED_BYTES, SHARED_BYTES, true);
    }
    moment.launch = ++launches;
    moment.block = moment.barriers = 0;
    moment.early = begins_early;
    has_waited = false;
    if (!begins_early) moment.plain = moment.launch;
    running = found->first.c_str();
    kernel = &found->second;
    arguments = args;
    n_threads = bx;
    shared_bytes = (bytes + 127) / 128 * 128;
    for (unsigned z = 0; z < gz; z++)
        for (unsigned y = 0; y < gy; y++)
            for (unsigned x = 0; x < gx; x++) run_block({x, y, z}, {bx, 1, 1}, {gx, gy, gz});
    moment.launch = 0;
    /* Launches behind this one wait for its end, and by that for all before it. */
    if (begins_early && !has_waited) die("it began early and has ended without waiting");
    return 0;
}
/* What may overlap does not, but what it may touch meanwhile is watched. */
int cuLaunchKernelEx(const CUlaunchConfig *c, void *function, void **args, void **extra) {
    for (unsigned i = 0; i < c->n_attributes; i++) {
        begins_early |=
            c->attributes[i].id == CU_LAUNCH_PROGRAMMATIC && c->attributes[i].value.number;
    }
    int r = cuLaunchKernel(function, c->grid_x, c->grid_y, c->grid_z, c->block_x, c->block_y,
                           c->block_z, c->shared, c->stream, args, extra);
    begins_early = false;
    return r;
}
int cuLaunchCooperativeKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                              unsigned, void *, void **) {
    return 801;
}

} // extern "C"
