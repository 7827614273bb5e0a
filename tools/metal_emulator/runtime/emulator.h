/* Controls and observations of the emulated Metal runtime, for tests. The host under test sees none
 * of this: it includes src/backend/metal/mtl.h and links against the same names as on a Mac.
 *
 * The emulated GPU has no thread of its own. Committed work runs inside a call that waits for it or
 * asks about it: with METAL_EMU_LATE as late as the API allows, so that a host which reads too soon
 * or writes too early is caught every time; with METAL_EMU_EARLY inside commit. A rule that a host
 * breaks is a finding: printed, kept, and counted at exit. What no program can survive (an unknown
 * selector, a message to a released object, a touch of a released buffer) aborts. */
#ifndef LILY_METAL_EMULATOR_EMULATOR_H
#define LILY_METAL_EMULATOR_EMULATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Every rule, with the name that a finding's text begins with. */
#define METAL_EMU_FINDINGS(X)                                                                      \
    X(BINDING_MISSING, "binding missing")       /* a declared argument has nothing bound */        \
    X(BINDING_DUPLICATE, "binding duplicate")   /* an index set twice before one dispatch */       \
    X(BINDING_UNKNOWN, "binding unknown")       /* set for this dispatch, not declared */          \
    X(BINDING_SIZE, "binding size")             /* not the bytes of the argument's type */         \
    X(INDEX, "argument index")                  /* above 30 */                                     \
    X(OFFSET, "buffer offset")                  /* at or beyond the length, or not 4-aligned */    \
    X(BYTES, "setBytes length")                 /* 0 or above 4,096 */                             \
    X(THREADGROUP_MEMORY, "threadgroup memory") /* not a multiple of 16, above the limit */        \
    X(THREADS, "threads per threadgroup")       /* 0, above the limit, not whole simdgroups */     \
    X(GRID, "grid")                             /* empty */                                        \
    X(PIPELINE_MISSING, "pipeline missing")     /* dispatch before setComputePipelineState: */     \
    X(ENCODER_OPEN, "encoder not ended")        /* at commit, release or a second encoder */       \
    X(ENCODER_ENDED, "encoder already ended")   /* encoding after endEncoding */                   \
    X(COMMITTED, "already committed")           /* commit or encoding after commit */              \
    X(NEVER_COMMITTED, "never committed")       /* waited for or released before commit */         \
    X(BARRIER, "barrier")                       /* serial encoder, or nothing that it orders */    \
    X(HAZARD, "missing barrier")                /* unordered dispatches touch the same bytes */    \
    X(EVENT_NEVER, "event never signalled")     /* a wait that nothing can end */                  \
    X(EVENT_ORDER, "event value not larger")    /* a signal that does not increase the value */    \
    X(BUFFER_RELEASED, "released while in use") /* unretained command buffer outlives resource */  \
    X(CPU_WRITE, "written by the CPU")          /* while a command buffer that uses it runs */     \
    X(BUFFER_ARGUMENT, "buffer")                /* length, alignment or mapping */                 \
    X(COMPILE_OPTIONS, "compile options")       /* language version or math mode not stated */     \
    X(CONSTANT, "function constant")            /* unknown type, size mismatch */                  \
    X(ARGUMENT, "argument class")               /* nil, or an object of another class */           \
    X(POOL, "autorelease pool")                 /* none in place, or popped out of order */        \
    X(OVER_RELEASE, "released too often")       /* seen by the pool */                             \
    X(LEAK, "not released")                     /* at exit */                                      \
    X(KERNEL, "kernel fault")                   /* the executor's report */

#define METAL_EMU_ENUM(name, text) METAL_EMU_##name,
enum metal_emu_kind { METAL_EMU_FINDINGS(METAL_EMU_ENUM) METAL_EMU_KINDS };
#undef METAL_EMU_ENUM

struct metal_emu_finding {
    enum metal_emu_kind kind;
    char text[400];
};

/* What a device is. Working set and buffer limits follow from the memory as Metal's own do by
 * public reports: two thirds of it up to 32 GiB, three quarters above; one buffer three quarters of
 * the working set. Not measured by this project. */
struct metal_emu_profile {
    const char *name;
    uint32_t memory_gib;
    int32_t apple_family; /* MTLGPUFamilyApple<n>; smaller ones are supported too */
    int32_t macos; /* 2602 is 26.2: language 4.0 and MTLGPUFamilyMetal4 are of macOS 26, tensor
                      operations on bfloat are in no header before 26.2 */
};

enum metal_emu_schedule { METAL_EMU_LATE, METAL_EMU_EARLY };

struct metal_emu_options {
    struct metal_emu_profile profile;
    uint64_t working_set;      /* 0: from the profile */
    uint64_t max_buffer;       /* 0: from the profile */
    uint32_t pipeline_threads; /* limit of every pipeline; 0: what the kernel declares */
    enum metal_emu_schedule schedule;
    bool checked;                /* compile with every access reported: hazards, bytes, faults */
    bool contract;               /* passed to the compiler */
    bool fill;                   /* new buffers hold 0xA5 rather than zeros */
    bool quiet;                  /* findings are kept but not printed */
    uint64_t seed;               /* order of unordered dispatches and of threads; 0: as recorded */
    double seconds_per_dispatch; /* emulated GPU time; 0: the time that execution really took */
    /* Emulated GPU time of a command buffer that has run; NULL: as above. */
    double (*seconds)(void *arg, const char *label);
    void *seconds_arg;
    double watchdog_seconds; /* a longer command buffer fails with a timeout; 0: none */
    uint32_t hang_ms;        /* how long a wait may rest on another thread of the host */
    const char *cache_dir;   /* of the executor, may be NULL */
};

/* NULL when no profile has that name ("M1 8 GB", "M5 Max 128 GB", ...). */
const struct metal_emu_profile *metal_emu_profile(const char *name);

/* The defaults: M1 8 GB, late, checked, filled, in order, 1 s of hang, 10 us a dispatch. */
struct metal_emu_options metal_emu_defaults(void);

/* Takes effect for devices, libraries and command buffers made afterwards. */
void metal_emu_configure(const struct metal_emu_options *options);

/* ---- Findings ---- */

size_t metal_emu_finding_count(void);
const struct metal_emu_finding *metal_emu_finding(size_t index);
size_t metal_emu_count_of(enum metal_emu_kind kind);
const char *metal_emu_kind_name(enum metal_emu_kind kind);

/* Objects alive now; strings and errors of pools not yet popped count too. */
size_t metal_emu_live_objects(void);

/* Adds a LEAK finding for each class with living objects; returns how many objects. Runs at exit by
 * itself, where any finding turns the exit status into METAL_EMU_EXIT. */
size_t metal_emu_check_leaks(void);
enum { METAL_EMU_EXIT = 70 };

/* Forgets findings, graphs and injected errors. */
void metal_emu_reset(void);

/* ---- The machine ---- */

/* What the system says of its memory from now on: 1 normal, 2 a warning, 4 critical. Sources of
 * the host are told, on a thread of the system's, before this returns. */
void metal_emu_memory_pressure(int level);
/* Memory-pressure sources that the host has not given back. */
size_t metal_emu_live_sources(void);

/* ---- Recorded graphs ---- */

/* One graph for each command buffer that ended, oldest first. As JSON: label, status, encoders,
 * dispatches, stages (the longest chain that order imposes), barriers, unique_read, unique_written
 * (bytes of buffers), traffic_read, traffic_written (unique bytes of each dispatch, added up), and
 * nodes: kernel, stage, groups, threads, read, written. Bytes are 0 in unchecked libraries. */
size_t metal_emu_graph_count(void);
char *metal_emu_graph_json(size_t index); /* to be freed with free */

/* ---- Injected errors ---- */

/* The command buffer committed after `skip` others fails with that MTLCommandBufferError after
 * `dispatches` of its dispatches have run. With `poison`, its queue answers everything later with
 * an error too, as after a GPU restart: the host must make a new queue. */
void metal_emu_inject(uint32_t skip, long error_code, uint32_t dispatches, bool poison);

/* The next newBuffer... calls return nil after `skip` that succeed. */
void metal_emu_inject_no_memory(uint32_t skip);

/* The method of that name, or MTLCreateSystemDefaultDevice, returns nil once, after `skip` calls
 * that succeed. metal_emu_nil_returned: it has done so. */
void metal_emu_inject_nil(const char *name, uint32_t skip);
bool metal_emu_nil_returned(void);

#endif
