/* Executes Metal kernels on Linux, for tests: the interface between the emulated Metal runtime
 * (or a test) and the front end, the compiler and the executor behind it.
 *
 * A library is MSL source text compiled once (rewriter, then clang-19) into a shared object that is
 * cached by the hash of source, options and tool version. A checked library reports every memory
 * access to the executor; a fast one does not. A pipeline is one kernel with the values of its
 * function constants. A dispatch runs to its end before it returns; threads are fibers of the
 * calling thread and the order of threadgroups and simdgroups follows the seed. One dispatch at a
 * time: calls from several threads are serialised inside.
 *
 * Every function that can fail returns 0, or a negative number with a message in `msg`, which holds
 * at most MSL_MESSAGE_MAX bytes including the terminator. A fault of a kernel is not a failure of
 * the call: it is in the report. */
#ifndef LILY_METAL_EMULATOR_EXECUTOR_H
#define LILY_METAL_EMULATOR_EXECUTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    MSL_MESSAGE_MAX = 8192,
    MSL_MAX_BUFFERS = 31, /* buffer indices 0 to 30, as on a Mac */
    MSL_MAX_TG_ARGS = 31, /* threadgroup memory indices */
    MSL_SIMD_WIDTH = 32,
    MSL_MAX_THREADS = 1024, /* threads per threadgroup, when the kernel names no smaller limit */
    MSL_TG_MEMORY = 32768   /* bytes of threadgroup memory, static and dynamic together */
};

typedef struct msl_library msl_library;   /* owned by the caller until msl_library_free */
typedef struct msl_pipeline msl_pipeline; /* must be freed before its library */

/* ---- Compilation ---- */

typedef struct msl_compile_options {
    bool checked;          /* instrument every access; about ten times slower */
    bool contract;         /* let a * b + c become one fused operation, across statements too */
    const char *defines;   /* preprocessor macros, "A=1 B=2", or NULL */
    const char *tool_root; /* directory tools/metal_emulator; NULL: where the executor was built */
    const char *cache_dir; /* NULL: build/metal_emulator/cache beside tool_root's repository */
    uint32_t language;     /* of Metal: 310, 320, 400; 0 follows the text. Tensors need 400 */
} msl_compile_options;

/* Compiles (or finds in the cache) and loads `source`. `msg` holds the diagnostics on failure, with
 * the line numbers of the source text. Source: rules in tools/metal_emulator/README.md. */
int msl_library_compile(const char *source, const msl_compile_options *options,
                        msl_library **library, char *msg);
void msl_library_free(msl_library *library);

/* ---- Reflection ---- */

typedef enum msl_binding_kind {
    MSL_BIND_DEVICE,      /* [[buffer(n)]], device address space */
    MSL_BIND_CONSTANT,    /* [[buffer(n)]], constant address space: always read only */
    MSL_BIND_THREADGROUP, /* [[threadgroup(n)]] */
} msl_binding_kind;

typedef enum msl_access { MSL_READ = 1, MSL_WRITE = 2, MSL_READ_WRITE = 3 } msl_access;

typedef struct msl_binding {
    msl_binding_kind kind;
    msl_access access;     /* what the declared type permits, not what the kernel does */
    uint32_t index;        /* n of [[buffer(n)]] or [[threadgroup(n)]] */
    uint32_t element_size; /* sizeof the pointee, or of the referenced struct */
    bool reference;        /* `constant T &x`: exactly one element, so length >= element_size */
    const char *name;      /* parameter name */
} msl_binding;

typedef struct msl_kernel {
    const char *name; /* host name */
    const msl_binding *bindings;
    size_t binding_count;
    uint32_t max_threads; /* [[max_total_threads_per_threadgroup(n)]], else MSL_MAX_THREADS */
} msl_kernel;

typedef struct msl_constant { /* a function constant of the library */
    const char *name;
    uint32_t index;
    uint32_t size; /* bytes of its type */
} msl_constant;

size_t msl_library_kernel_count(const msl_library *library);
const msl_kernel *msl_library_kernel(const msl_library *library, size_t i);       /* by position */
const msl_kernel *msl_library_find(const msl_library *library, const char *name); /* or NULL */
size_t msl_library_constant_count(const msl_library *library);
const msl_constant *msl_library_constant(const msl_library *library, size_t i);

/* ---- Pipelines ---- */

typedef struct msl_constant_value {
    const char *name; /* NULL: use index */
    uint32_t index;
    uint32_t size; /* must equal the constant's size */
    const void *value;
} msl_constant_value;

/* Values are copied. A value for an index the library lacks is ignored, as on a Mac; a constant
 * that the kernel uses without a value is a fault of the dispatch in a checked library. */
int msl_pipeline_create(msl_library *library, const char *kernel, const msl_constant_value *values,
                        size_t count, msl_pipeline **pipeline, char *msg);
void msl_pipeline_free(msl_pipeline *pipeline);
const msl_kernel *msl_pipeline_kernel(const msl_pipeline *pipeline);

/* ---- Dispatch ---- */

typedef struct msl_size {
    uint32_t x, y, z;
} msl_size;

typedef struct msl_buffer {
    void *base;    /* first byte of the allocation; NULL when nothing is bound at this index */
    size_t length; /* bytes of the allocation */
    size_t offset; /* where the kernel's pointer starts; accesses from base + offset on are legal */
} msl_buffer;

typedef struct msl_dispatch {
    msl_size grid;  /* threads (dispatchThreads: ragged edges run partial threadgroups) */
    msl_size group; /* threads per threadgroup */
    msl_buffer buffers[MSL_MAX_BUFFERS];
    uint32_t tg_length[MSL_MAX_TG_ARGS]; /* bytes of each threadgroup argument */
    uint64_t seed; /* 0: in order; else threadgroups and simdgroups in an order drawn from it */
} msl_dispatch;

typedef enum msl_fault_kind {
    MSL_FAULT_RACE,          /* two threads, one of them writing, no barrier between */
    MSL_FAULT_OUT_OF_BOUNDS, /* outside every bound buffer and threadgroup variable */
    MSL_FAULT_UNINITIALISED, /* threadgroup memory read before it was written */
    MSL_FAULT_BARRIER,       /* threads of a threadgroup at different barriers, or returned */
    MSL_FAULT_SIMD_PARTIAL,  /* a simd operation reached by some lanes of a simdgroup only */
    MSL_FAULT_READ_ONLY,     /* write through a const or constant binding */
    MSL_FAULT_UNBOUND,       /* a declared buffer has nothing bound, or too little for its type */
    MSL_FAULT_MISALIGNED,    /* bound pointer not aligned for its element type */
    MSL_FAULT_CONSTANT_MISSING, /* function constant without a value */
    MSL_FAULT_TG_MEMORY,        /* more threadgroup memory than MSL_TG_MEMORY, or none set */
    MSL_FAULT_THREADS           /* group empty or larger than the kernel's limit */
} msl_fault_kind;

typedef struct msl_fault { /* one for each kind, source line and buffer; `count` says how often */
    msl_fault_kind kind;
    const char *kernel;
    uint32_t line;        /* line of the MSL source, 0 when unknown */
    int32_t buffer;       /* buffer index, -1: threadgroup memory, -2: none */
    uint64_t offset;      /* bytes from the start of the allocation or threadgroup variable */
    uint32_t group[3];    /* threadgroup position of the thread that met it */
    uint32_t thread;      /* its index in the threadgroup */
    int64_t other;        /* index of the other thread of a race, -1: none */
    uint32_t other_group; /* and its threadgroup's linear position */
    uint64_t count;
    char text[192]; /* all of it as a sentence */
} msl_fault;

typedef struct msl_range { /* bytes [begin, end) from the start of the allocation */
    uint64_t begin, end;
} msl_range;

typedef struct msl_usage { /* checked libraries only: what a dispatch did to a buffer */
    uint32_t index;
    uint64_t bytes_read, bytes_written; /* traffic: each access counted */
    const msl_range *read, *written;    /* unique bytes, ascending, disjoint, not adjacent */
    size_t read_count, written_count;
    uint64_t unique_read, unique_written;
} msl_usage;

typedef struct msl_report {
    msl_fault *faults;
    size_t fault_count;
    msl_usage *usage; /* one for each bound buffer the kernel declares */
    size_t usage_count;
    uint64_t threads, groups;
    uint64_t group_barriers, simd_barriers, simd_operations; /* per threadgroup or simdgroup */
    uint32_t tg_static, tg_dynamic;                          /* bytes of threadgroup memory */
} msl_report;

/* Runs the grid and fills *report, which the caller frees with msl_report_free. A fault that makes
 * execution impossible (unbound buffer, too many threads) leaves the kernel unexecuted. */
int msl_dispatch_run(msl_pipeline *pipeline, const msl_dispatch *dispatch, msl_report **report,
                     char *msg);
void msl_report_free(msl_report *report);

const char *msl_fault_name(msl_fault_kind kind);

#ifdef __cplusplus
}
#endif
#endif
