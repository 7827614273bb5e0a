/* MTLCommandQueue, MTLCommandBuffer and MTLSharedEvent: recording, committing, waiting. */
#include "internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static const char *buffer_name(const struct emu_command_buffer *commands) {
    return commands->label ? commands->label : "command buffer without label";
}

/* ---- Queue ---- */

id emu_queue_new(void) {
    struct emu_queue *queue = emu_new(&emu_queue_class);
    emu_lock();
    emu_queue_link(queue);
    emu_unlock();
    return &queue->object;
}

static void queue_dealloc(id self) {
    emu_queue_unlink((struct emu_queue *)self);
}

static id new_command_buffer(struct emu_queue *queue, bool retains) {
    struct emu_command_buffer *commands = emu_new(&emu_command_buffer_class);
    commands->queue = queue;
    objc_retain(&queue->object);
    commands->retains = retains;
    return emu_autorelease(&commands->object);
}

static id queue_command_buffer(id self, SEL selector) {
    (void)selector;
    return new_command_buffer((struct emu_queue *)self, true);
}

static id queue_command_buffer_unretained(id self, SEL selector) {
    (void)selector;
    return new_command_buffer((struct emu_queue *)self, false);
}

static const struct emu_method queue_methods[] = {
    EMU_METHOD("commandBuffer", queue_command_buffer),
    EMU_METHOD("commandBufferWithUnretainedReferences", queue_command_buffer_unretained),
    EMU_METHODS_END,
};
struct objc_class emu_queue_class = {
    .object.isa = &emu_metaclass,
    .name = "MTLCommandQueue",
    .size = sizeof(struct emu_queue),
    .methods = queue_methods,
    .dealloc = queue_dealloc,
};

/* ---- Recording ---- */

struct emu_command *emu_command_add(struct emu_command_buffer *commands,
                                    enum emu_command_kind kind) {
    if (commands->count == commands->capacity) {
        commands->capacity = commands->capacity ? 2 * commands->capacity : 64;
        commands->commands =
            realloc(commands->commands, commands->capacity * sizeof *commands->commands);
        if (!commands->commands) abort();
    }
    struct emu_command *command = &commands->commands[commands->count++];
    memset(command, 0, sizeof *command);
    command->kind = kind;
    return command;
}

void emu_command_hold(struct emu_command_buffer *commands, id object) {
    for (size_t i = 0; i < commands->held_count; i++) {
        if (commands->held[i] == object) return;
    }
    if (commands->held_count == commands->held_capacity) {
        commands->held_capacity = commands->held_capacity ? 2 * commands->held_capacity : 64;
        commands->held = realloc(commands->held, commands->held_capacity * sizeof(id));
        if (!commands->held) abort();
    }
    commands->held[commands->held_count++] = object;
    if (commands->retains) objc_retain(object);
}

/* May more be encoded, and is no encoder in the way? */
static bool may_encode(struct emu_command_buffer *commands, const char *what) {
    if (commands->status >= MTLCommandBufferStatusCommitted) {
        emu_find(METAL_EMU_COMMITTED, "%s: %s after commit", buffer_name(commands), what);
        return false;
    }
    if (commands->open) {
        emu_find(METAL_EMU_ENCODER_OPEN, "%s: %s while an encoder is open", buffer_name(commands),
                 what);
        return false;
    }
    return true;
}

static id commands_encoder(id self, SEL selector, NSUInteger type) {
    (void)selector;
    struct emu_command_buffer *commands = (struct emu_command_buffer *)self;
    if (!may_encode(commands, "a new encoder")) return NULL;
    return emu_encoder_new(commands, type == MTLDispatchTypeConcurrent);
}

static void add_event(id self, id event, uint64_t value, enum emu_command_kind kind) {
    struct emu_command_buffer *commands = (struct emu_command_buffer *)self;
    if (!emu_expect(event, &emu_event_class, "an event to encode")) return;
    if (!may_encode(commands, kind == EMU_SIGNAL ? "a signal" : "a wait")) return;
    struct emu_command *command = emu_command_add(commands, kind);
    command->event = (struct emu_event *)event;
    command->value = value;
    emu_command_hold(commands, event);
}

static void commands_signal(id self, SEL selector, id event, uint64_t value) {
    (void)selector;
    add_event(self, event, value, EMU_SIGNAL);
}

static void commands_wait_event(id self, SEL selector, id event, uint64_t value) {
    (void)selector;
    add_event(self, event, value, EMU_WAIT);
}

static void commands_set_label(id self, SEL selector, id label) {
    (void)selector;
    emu_copy_label(&((struct emu_command_buffer *)self)->label, label);
}

/* ---- Commit and wait ---- */

static void commands_commit(id self, SEL selector) {
    (void)selector;
    struct emu_command_buffer *commands = (struct emu_command_buffer *)self;
    if (!may_encode(commands, "commit")) return;
    emu_gpu_submit(commands);
}

static bool ended(const void *context) {
    const struct emu_command_buffer *commands = context;
    return commands->status >= MTLCommandBufferStatusCompleted;
}

static void commands_wait(id self, SEL selector) {
    (void)selector;
    struct emu_command_buffer *commands = (struct emu_command_buffer *)self;
    if (commands->status < MTLCommandBufferStatusCommitted) {
        emu_find(METAL_EMU_NEVER_COMMITTED, "%s: waitUntilCompleted would never return",
                 buffer_name(commands));
        return;
    }
    emu_lock();
    while (!emu_gpu_run_until(ended, commands, emu_options.hang_ms)) {
        struct emu_command_buffer *blocked = commands->queue->head;
        const struct emu_command *at = &blocked->commands[blocked->at];
        emu_find(METAL_EMU_EVENT_NEVER, "%s waits for value %" PRIu64 ", the event is at %" PRIu64,
                 buffer_name(blocked), at->value, at->event->value);
        emu_gpu_fail(blocked, MTLCommandBufferErrorTimeout, "an event was never signalled");
    }
    emu_unlock();
}

static NSUInteger commands_status(id self, SEL selector) {
    (void)selector;
    emu_lock();
    emu_gpu_poll(); /* a host that polls must see the work end some time */
    NSUInteger status = ((struct emu_command_buffer *)self)->status;
    emu_unlock();
    return status;
}

static id commands_error(id self, SEL selector) {
    (void)selector;
    return (id)((struct emu_command_buffer *)self)->error;
}

static double commands_start(id self, SEL selector) {
    (void)selector;
    return ((struct emu_command_buffer *)self)->start;
}

static double commands_end(id self, SEL selector) {
    (void)selector;
    return ((struct emu_command_buffer *)self)->end;
}

static void commands_dealloc(id self) {
    struct emu_command_buffer *commands = (struct emu_command_buffer *)self;
    if (commands->status < MTLCommandBufferStatusCommitted) {
        emu_find(METAL_EMU_NEVER_COMMITTED, "%s was released", buffer_name(commands));
        for (size_t i = 0; commands->retains && i < commands->held_count; i++) {
            objc_release(commands->held[i]);
        }
    }
    for (size_t i = 0; i < commands->count; i++) {
        emu_dispatch_free(commands->commands[i].dispatch);
        free(commands->commands[i].list);
    }
    free(commands->commands);
    free(commands->held);
    free(commands->label);
    objc_release((id)commands->error);
    objc_release(&commands->queue->object);
}

static const struct emu_method commands_methods[] = {
    EMU_METHOD("computeCommandEncoderWithDispatchType:", commands_encoder),
    EMU_METHOD("encodeSignalEvent:value:", commands_signal),
    EMU_METHOD("encodeWaitForEvent:value:", commands_wait_event),
    EMU_METHOD("setLabel:", commands_set_label),
    EMU_METHOD("commit", commands_commit),
    EMU_METHOD("waitUntilCompleted", commands_wait),
    EMU_METHOD("status", commands_status),
    EMU_METHOD("error", commands_error),
    EMU_METHOD("GPUStartTime", commands_start),
    EMU_METHOD("GPUEndTime", commands_end),
    EMU_METHODS_END,
};
struct objc_class emu_command_buffer_class = {
    .object.isa = &emu_metaclass,
    .name = "MTLCommandBuffer",
    .size = sizeof(struct emu_command_buffer),
    .methods = commands_methods,
    .dealloc = commands_dealloc,
};

/* ---- Shared events ---- */

struct reached {
    const struct emu_event *event;
    uint64_t value;
};

static bool event_reached(const void *context) {
    const struct reached *wanted = context;
    return wanted->event->value >= wanted->value;
}

static uint64_t event_value(id self, SEL selector) {
    (void)selector;
    emu_lock();
    emu_gpu_poll();
    uint64_t value = ((struct emu_event *)self)->value;
    emu_unlock();
    return value;
}

static void event_set_value(id self, SEL selector, uint64_t value) {
    (void)selector;
    struct emu_event *event = (struct emu_event *)self;
    emu_lock();
    if (value < event->value) {
        emu_find(METAL_EMU_EVENT_ORDER, "the CPU sets %" PRIu64 " after %" PRIu64, value,
                 event->value);
    }
    event->value = value;
    emu_unlock();
}

static bool event_wait(id self, SEL selector, uint64_t value, uint64_t milliseconds) {
    (void)selector;
    struct reached wanted = {(struct emu_event *)self, value};
    uint32_t hang = emu_options.hang_ms;
    if (milliseconds < hang) hang = (uint32_t)milliseconds;
    emu_lock();
    bool met = emu_gpu_run_until(event_reached, &wanted, hang);
    if (!met) {
        emu_find(METAL_EMU_EVENT_NEVER, "the CPU waits for value %" PRIu64 ", it is %" PRIu64,
                 value, wanted.event->value);
    }
    emu_unlock();
    return met;
}

static const struct emu_method event_methods[] = {
    EMU_METHOD("signaledValue", event_value),
    EMU_METHOD("setSignaledValue:", event_set_value),
    EMU_METHOD("waitUntilSignaledValue:timeoutMS:", event_wait),
    EMU_METHODS_END,
};
struct objc_class emu_event_class = {
    .object.isa = &emu_metaclass,
    .name = "MTLSharedEvent",
    .size = sizeof(struct emu_event),
    .methods = event_methods,
};
