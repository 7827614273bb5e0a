// Shared by the parts of the executor: loaded images, the machine that runs fibers, the checker.
#pragma once

#include "../shim/runtime.h"
#include "executor.h"

#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace msl {

struct Constant {
    std::string name;
    unsigned index;
    char *address;
    unsigned size;
};

struct Kernel {
    std::string name;
    void (*run)(const void *);
    std::vector<msl_binding> bindings;
    std::vector<unsigned> alignments; // of the bindings
    msl_kernel info;
};

// A shared object of kernels; stays loaded once loaded, since its code may be referred to.
struct Image {
    std::string path;
    bool checked = false;
    std::vector<Kernel *> kernels;
    std::vector<Constant> constants;
    std::vector<msl_constant> constant_info;
    const char *tg_begin = nullptr, *tg_end = nullptr; // section of threadgroup variables
    const char *begin = nullptr, *end = nullptr;       // everything the loader mapped
};

enum class State { ready, simd_operation, simd_barrier, group_barrier, done };

struct Fiber {
    void *stack_pointer;
    char *stack;
    State state;
    const void *site; // where it waits
    int flags;        // of the barrier it waits at; meeting: no barrier, a tensor operation
    void *offered;    // to the others of a meeting
    msl_thread_context context;
    const void *calls[32]; // return addresses of instrumented calls, for source lines
    unsigned depth;
};

struct Simdgroup {
    unsigned first, count; // fibers
    msl_simd_round round;
    // Values of the round being read, and of lanes that wait: these two take turns.
    alignas(16) unsigned char values[2][32][64];
    unsigned next;    // index of the latter
    unsigned arrived; // lanes that wait
    const void *site; // of the first of them
    bool one_site;    // and of all others
};

constexpr int meeting = -1;
constexpr size_t stack_size = 128 * 1024;
// Stacks start at different distances from their page, else all would meet in a few cache lines.
constexpr size_t stack_colours = 64, stack_colour = 13 * 64;

struct Machine {
    std::vector<Fiber> fibers;
    std::vector<Simdgroup> simdgroups;
    char *stacks = nullptr;
    Fiber *current = nullptr;
    void *scheduler = nullptr; // its stack pointer while a fiber runs
    const Image *image = nullptr;
    const Kernel *kernel = nullptr;
    bool stopped = false; // a fault after which going on makes no sense
    uint64_t random = 0, seed = 0;
    std::vector<void *> offered; // at the meeting just held
    bool meeting_held = false;   // and no thread has taken it up
    unsigned group_index = 0;
    msl_report *report = nullptr;
};
extern Machine machine;

Simdgroup &simdgroup_of(const Fiber &fiber);
[[noreturn]] void stop_kernel(); // from inside a fiber

// ---- faults (faults.cpp)

struct Place { // in memory, as a fault shows it
    int buffer;
    uint64_t offset;
    int64_t other = -1;
    unsigned other_group = 0;
};
void add_fault(msl_fault_kind kind, const void *site, Place place, const char *detail);
void collect_faults(msl_report *report); // moves them to the report

// ---- memory checks (checker.cpp)

void checker_begin(const msl_dispatch &dispatch, char *const *tg_memory,
                   const std::vector<std::pair<unsigned, bool>> &constants_set);
void checker_begin_group();
void checker_group_barrier(int flags);
void checker_simd_barrier(unsigned simdgroup, int flags);
void checker_end(msl_report *report);
void checker_access(uintptr_t address, size_t size, bool write, bool atomic, const void *site);
void checker_forget_variables(); // these two serve fast libraries too
unsigned checker_static_bytes();

} // namespace msl
