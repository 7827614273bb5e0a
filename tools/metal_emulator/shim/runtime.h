// What compiled kernels and the executor share: the one header that both include.
#pragma once

// The values exchanged in one simd operation; valid until the lane blocks again.
struct msl_simd_round {
    unsigned mask;                // lanes that take part
    int done;                     // a lane has already computed `result` for all
    unsigned char (*payload)[64]; // of each lane
    alignas(16) unsigned char result[512];
};

// Where a kernel's parameter gets its value: a binding or a built-in, named as its attribute.
enum class msl_source {
    end,
    device_argument,
    constant_argument,
    threadgroup_argument,
    thread_position_in_grid,
    threadgroup_position_in_grid,
    thread_position_in_threadgroup,
    threads_per_threadgroup,
    dispatch_threads_per_threadgroup,
    threadgroups_per_grid,
    threads_per_grid,
    thread_index_in_threadgroup,
    thread_index_in_simdgroup,
    simdgroup_index_in_threadgroup,
    simdgroups_per_threadgroup,
    threads_per_simdgroup,
    thread_execution_width
};
struct msl_parameter_info {
    msl_source source;
    unsigned index;
    const char *name;
    unsigned element_size, alignment;
    bool writable, reference;
};
// What a thread knows of itself.
struct msl_thread_context {
    void *const *buffers;
    void *const *threadgroup_memory;
    unsigned position_in_grid[3], group_position[3], position_in_group[3];
    unsigned group_size[3]; // of this threadgroup: smaller at a ragged edge
    unsigned full_group_size[3], group_count[3], grid_size[3];
    unsigned index_in_group, lane, simdgroup, simdgroup_count;
};

extern "C" {
// Hands `size` bytes to the other lanes and returns when all lanes at `site` have done so.
msl_simd_round *msl_simd_exchange(const void *value, unsigned size, const void *site);
void msl_threadgroup_barrier(const void *site, int flags);
void msl_simdgroup_barrier(const void *site, int flags);
void msl_threadgroup_variable(const void *base, unsigned size, const char *name);
unsigned msl_lane();
unsigned msl_thread();    // in its threadgroup
unsigned long msl_seed(); // of the dispatch
// Returns when all threads of the scope, one simdgroup or a whole threadgroup of `simdgroups`, have
// come to `site`: to the first that goes on what each thread handed in, by its number in the scope;
// to the others, and when threads are missing, null. Orders no memory.
void *const *msl_meet(void *mine, unsigned simdgroups, const void *site);
// Reports an access that no instruction of the kernel makes.
void msl_touch(const void *p, unsigned long size, bool write, const void *site);
void *msl_scratch(unsigned long size);      // valid until the next call
void msl_beyond_capacity(const void *site); // of a cooperative tensor; does not return
// The lane asked for is not taking part: reported, since Metal leaves the value undefined.
void msl_inactive_lane(const void *site);
bool msl_constant_defined(const void *constant);
void msl_register_kernel(const char *name, void (*run)(const void *),
                         const msl_parameter_info *parameters, unsigned count,
                         unsigned max_threads);
void msl_register_constant(const char *name, unsigned index, void *address, unsigned size);
void msl_register_section(const char *begin, const char *end);
}

#define MSL_SITE __builtin_return_address(0)
// Not inlined, so that the return address is the place in the kernel; convergent, so that the
// compiler neither duplicates nor merges calls across branches.
#define MSL_COLLECTIVE __attribute__((noinline, convergent))
