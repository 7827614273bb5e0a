/* The objects behind the emulated API, and what its files share. Everything here is under one lock
 * (emu_lock), except reference counts. */
#ifndef LILY_METAL_EMULATOR_INTERNAL_H
#define LILY_METAL_EMULATOR_INTERNAL_H

#include "../../../src/backend/metal/mtl.h"
#include "../executor/executor.h"
#include "emulator.h"

#include <jansson.h>

/* ---- Objective-C ---- */

typedef void (*emu_imp)(void);

struct objc_object {
    Class isa;
    atomic_int references;
    id older; /* every object ever made, newest first: the memory of dead ones stays reachable */
};

struct objc_selector {
    SEL next;
    char name[];
};

struct emu_method {
    const char *name;
    emu_imp imp;
};

/* Tables end with a NULL name. A class is itself an object, whose isa is emu_metaclass. */
struct objc_class {
    struct objc_object object;
    const char *name;
    size_t size;
    const struct emu_method *methods;
    const struct emu_method *class_methods;
    void (*dealloc)(id object);
    atomic_long live;
};

#define EMU_METHOD(name, function)                                                                 \
    { name, (emu_imp)(function) }
#define EMU_METHODS_END                                                                            \
    { NULL, NULL }

extern struct objc_class emu_metaclass;
extern struct objc_class emu_string_class, emu_error_class, emu_device_class, emu_queue_class,
    emu_buffer_class, emu_options_class, emu_library_class, emu_constants_class, emu_function_class,
    emu_pipeline_class, emu_command_buffer_class, emu_encoder_class, emu_event_class;

/* A new object with one reference, zeroed beyond its header. Memory of a released object stays
 * mapped, so that a late message finds its class and name. */
void *emu_new(Class class);
bool emu_is_dead(const void *object);
id emu_autorelease(id object);
emu_imp emu_lookup(id receiver, SEL selector); /* called by objc_msgSend */

void emu_lock(void);
void emu_unlock(void);

/* ---- Findings and options ---- */

void emu_find(enum metal_emu_kind kind, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* Is `object` a living one of this class? Otherwise a finding about `what`. */
bool emu_expect(id object, Class class, const char *what);
_Noreturn void emu_fatal(const char *format, ...) __attribute__((format(printf, 1, 2)));
extern struct metal_emu_options emu_options;

/* ---- Foundation ---- */

struct emu_string {
    struct objc_object object;
    char *text;
};

struct emu_error {
    struct objc_object object;
    NSInteger code;
    struct emu_string *text;
};

id emu_string_new(const char *text);                /* one reference */
id emu_error_new(NSInteger code, const char *text); /* one reference */
const char *emu_text(id string);                    /* "" for nil */
void emu_copy_label(char **label, id string);

/* ---- Metal ---- */

struct emu_device {
    struct objc_object object;
    struct emu_string *name;
};

struct emu_buffer {
    struct objc_object object;
    struct emu_buffer *next; /* all buffers ever made, for the fault handler */
    uint8_t *base;
    size_t length, mapped;
    bool owned, writable; /* owned: mapped by the emulator; writable: the CPU may write */
    bool gpu_only;        /* storage mode private: no contents for the CPU */
    bool protected;       /* the pages are read-only now */
    bool dead;
    uint32_t in_flight; /* committed command buffers that use it */
    char *label;
    int32_t level_seen, level_floor; /* stages.c: while one command buffer is measured */
};

struct emu_constants {
    struct objc_object object;
    struct {
        uint8_t bytes[8];
        uint32_t size;
        bool set;
    } values[64];
};

struct emu_library {
    struct objc_object object;
    msl_library *library;
};

struct emu_function {
    struct objc_object object;
    struct emu_library *library;
    const msl_kernel *kernel;
    struct emu_constants *constants; /* a snapshot, may be NULL */
};

struct emu_pipeline {
    struct objc_object object;
    struct emu_library *library;
    msl_pipeline *pipeline;
    const msl_kernel *kernel;
    uint32_t max_threads;
};

struct emu_event {
    struct objc_object object;
    uint64_t value;
};

struct emu_queue {
    struct objc_object object;
    struct emu_queue *next;                 /* all living queues */
    struct emu_command_buffer *head, *tail; /* committed and not ended; each holds a reference */
    bool poisoned;
    double busy_until;
};

struct emu_binding {
    struct emu_buffer *buffer;
    size_t offset;
    uint8_t *bytes; /* a copy made by setBytes, owned by the binding */
    size_t length;
    bool fresh; /* set since the last dispatch */
};

struct emu_dispatch {
    struct emu_pipeline *pipeline;
    struct emu_binding bindings[MSL_MAX_BUFFERS];
    uint32_t threadgroup[MSL_MAX_TG_ARGS];
    MTLSize groups, threads;
    struct emu_buffer *indirect;
    size_t indirect_offset;
    msl_report *report;
    int32_t stage;
};

enum emu_command_kind {
    EMU_BEGIN, /* of an encoder */
    EMU_END,
    EMU_DISPATCH,
    EMU_BARRIER_ALL,
    EMU_BARRIER_LIST,
    EMU_SIGNAL,
    EMU_WAIT
};

struct emu_command {
    enum emu_command_kind kind;
    bool concurrent;               /* EMU_BEGIN */
    struct emu_dispatch *dispatch; /* EMU_DISPATCH, owned */
    struct emu_buffer **list;      /* EMU_BARRIER_LIST, owned */
    size_t count;
    struct emu_event *event; /* EMU_SIGNAL, EMU_WAIT */
    uint64_t value;
};

struct emu_command_buffer {
    struct objc_object object;
    struct emu_queue *queue;
    struct emu_command_buffer *next;
    char *label;
    bool retains;
    NSUInteger status;
    struct emu_error *error;
    struct emu_encoder *open;
    struct emu_command *commands;
    size_t count, capacity, at; /* at: the next to run */
    id *held;                   /* every object used, each once; retained when `retains` */
    size_t held_count, held_capacity;
    double start, end;
    uint32_t dispatches_run;
    bool fails; /* by injection */
    NSInteger fail_code;
    uint32_t fail_after;
    bool fail_poisons;
};

struct emu_encoder {
    struct objc_object object;
    struct emu_command_buffer *commands;
    bool concurrent, ended;
    bool anything_to_order; /* a dispatch since the last barrier */
    struct emu_pipeline *pipeline;
    struct emu_binding bindings[MSL_MAX_BUFFERS];
    uint32_t threadgroup[MSL_MAX_TG_ARGS];
};

/* buffer.c */
id emu_device_new_buffer(id device, SEL selector, NSUInteger length, NSUInteger options);
id emu_device_new_buffer_no_copy(id device, SEL selector, void *bytes, NSUInteger length,
                                 NSUInteger options, id deallocator);
void emu_buffers_protect(struct emu_command_buffer *commands, bool protect);
void emu_buffers_in_flight(struct emu_command_buffer *commands, bool begin);
void emu_buffers_collect_writes(void); /* turns what the fault handler saw into findings */
size_t emu_allocated_bytes(void);
extern _Thread_local volatile bool emu_in_kernel; /* a fault now is the GPU's, not the CPU's */

/* library.c */
id emu_device_new_library(id device, SEL selector, id source, id options, id *error);
id emu_device_new_pipeline(id device, SEL selector, struct emu_function *function, id *error);

/* command.c */
struct emu_command *emu_command_add(struct emu_command_buffer *commands,
                                    enum emu_command_kind kind);
void emu_command_hold(struct emu_command_buffer *commands, id object);
id emu_queue_new(void);

/* encoder.c */
id emu_encoder_new(struct emu_command_buffer *commands, bool concurrent);
void emu_binding_clear(struct emu_binding *binding);
void emu_dispatch_free(struct emu_dispatch *dispatch);

/* gpu.c */
void emu_gpu_submit(struct emu_command_buffer *commands);
bool emu_gpu_run_until(bool (*done)(const void *context), const void *context, uint32_t hang_ms);
void emu_gpu_poll(void);
void emu_gpu_fail(struct emu_command_buffer *commands, NSInteger code, const char *text);
void emu_queue_link(struct emu_queue *queue);
void emu_queue_unlink(struct emu_queue *queue);
bool emu_inject_memory(void);

/* objc_runtime.c: whether this call is the one that shall return nil */
bool emu_inject_nil(const char *name);

/* hazard.c: commands first..last are one encoder, executed */
void emu_hazards_check(const struct emu_command_buffer *commands, size_t first, size_t last);
void emu_stages_assign(struct emu_command_buffer *commands);

/* graph.c */
void emu_graph_record(const struct emu_command_buffer *commands);
void emu_graphs_forget(void);

#endif
