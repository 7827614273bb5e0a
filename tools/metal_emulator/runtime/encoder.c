/* MTLComputeCommandEncoder: every rule that can be told while encoding is checked here. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

static void encoder_find_ended(const char *what) {
    emu_find(METAL_EMU_ENCODER_ENDED, "%s after endEncoding", what);
}

id emu_encoder_new(struct emu_command_buffer *commands, bool concurrent) {
    struct emu_encoder *encoder = emu_new(&emu_encoder_class);
    encoder->commands = commands;
    objc_retain(&commands->object);
    encoder->concurrent = concurrent;
    commands->open = encoder;
    emu_command_add(commands, EMU_BEGIN)->concurrent = concurrent;
    return emu_autorelease(&encoder->object);
}

void emu_binding_clear(struct emu_binding *binding) {
    free(binding->bytes);
    memset(binding, 0, sizeof *binding);
}

void emu_dispatch_free(struct emu_dispatch *dispatch) {
    if (!dispatch) return;
    for (size_t i = 0; i < MSL_MAX_BUFFERS; i++) emu_binding_clear(&dispatch->bindings[i]);
    if (dispatch->report) msl_report_free(dispatch->report);
    free(dispatch);
}

static void encoder_dealloc(id self) {
    struct emu_encoder *encoder = (struct emu_encoder *)self;
    if (!encoder->ended) {
        emu_find(METAL_EMU_ENCODER_OPEN, "the encoder was released");
        encoder->commands->open = NULL;
    }
    for (size_t i = 0; i < MSL_MAX_BUFFERS; i++) emu_binding_clear(&encoder->bindings[i]);
    objc_release(&encoder->commands->object);
}

/* ---- State ---- */

static void encoder_pipeline(id self, SEL selector, id pipeline) {
    (void)selector;
    struct emu_encoder *encoder = (struct emu_encoder *)self;
    if (encoder->ended) {
        encoder_find_ended("setComputePipelineState:");
        return;
    }
    if (!emu_expect(pipeline, &emu_pipeline_class, "setComputePipelineState:")) return;
    encoder->pipeline = (struct emu_pipeline *)pipeline;
}

/* The slot to bind at, emptied; NULL when it may not be bound. */
static struct emu_binding *slot(struct emu_encoder *encoder, NSUInteger index) {
    if (encoder->ended) {
        encoder_find_ended("an argument");
        return NULL;
    }
    if (index >= MSL_MAX_BUFFERS) {
        emu_find(METAL_EMU_INDEX, "%lu, at most %d", index, MSL_MAX_BUFFERS - 1);
        return NULL;
    }
    struct emu_binding *binding = &encoder->bindings[index];
    if (binding->fresh) {
        emu_find(METAL_EMU_BINDING_DUPLICATE, "index %lu is set twice before the dispatch", index);
    }
    emu_binding_clear(binding);
    return binding;
}

static void encoder_buffer(id self, SEL selector, id object, NSUInteger offset, NSUInteger index) {
    (void)selector;
    struct emu_buffer *buffer = (struct emu_buffer *)object;
    struct emu_binding *binding = slot((struct emu_encoder *)self, index);
    if (!binding || !emu_expect(object, &emu_buffer_class, "setBuffer:")) return;
    if (offset >= buffer->length || offset % 4 != 0) {
        emu_find(METAL_EMU_OFFSET, "%lu at index %lu, expected a multiple of 4 below %zu", offset,
                 index, buffer->length);
        return;
    }
    binding->buffer = buffer;
    binding->offset = offset;
    binding->length = buffer->length;
    binding->fresh = true;
}

static void encoder_bytes(id self, SEL selector, const void *bytes, NSUInteger length,
                          NSUInteger index) {
    (void)selector;
    struct emu_binding *binding = slot((struct emu_encoder *)self, index);
    if (!binding) return;
    if (length == 0 || length > 4096) {
        emu_find(METAL_EMU_BYTES, "%lu at index %lu, expected 1 to 4096", length, index);
        return;
    }
    binding->bytes = aligned_alloc(256, (length + 255) / 256 * 256);
    if (!binding->bytes) abort();
    memcpy(binding->bytes, bytes, length);
    binding->length = length;
    binding->fresh = true;
}

static void encoder_threadgroup(id self, SEL selector, NSUInteger length, NSUInteger index) {
    (void)selector;
    struct emu_encoder *encoder = (struct emu_encoder *)self;
    if (encoder->ended) {
        encoder_find_ended("setThreadgroupMemoryLength:");
    } else if (index >= MSL_MAX_TG_ARGS) {
        emu_find(METAL_EMU_INDEX, "threadgroup memory %lu", index);
    } else if (length % 16 != 0 || length > MSL_TG_MEMORY) {
        emu_find(METAL_EMU_THREADGROUP_MEMORY, "%lu bytes, expected a multiple of 16 up to %d",
                 length, MSL_TG_MEMORY);
    } else {
        encoder->threadgroup[index] = (uint32_t)length;
    }
}

/* ---- Dispatch ---- */

/* Does what is bound suit the kernel's declaration? */
static bool arguments_suit(struct emu_encoder *encoder, const msl_kernel *kernel) {
    bool declared[MSL_MAX_BUFFERS] = {false}, right = true;
    size_t dynamic = 0;
    for (size_t i = 0; i < kernel->binding_count; i++) {
        const msl_binding *argument = &kernel->bindings[i];
        if (argument->kind == MSL_BIND_THREADGROUP) {
            size_t length = encoder->threadgroup[argument->index];
            dynamic += length;
            if (length > 0) continue;
            emu_find(METAL_EMU_THREADGROUP_MEMORY, "%s: none set for %s, index %u", kernel->name,
                     argument->name, argument->index);
            right = false;
            continue;
        }
        const struct emu_binding *binding = &encoder->bindings[argument->index];
        declared[argument->index] = true;
        size_t bytes = binding->length - binding->offset;
        if (!binding->buffer && !binding->bytes) {
            emu_find(METAL_EMU_BINDING_MISSING, "%s: nothing at index %u (%s)", kernel->name,
                     argument->index, argument->name);
            right = false;
        } else if (bytes < argument->element_size ||
                   (binding->bytes && argument->reference && bytes != argument->element_size)) {
            emu_find(METAL_EMU_BINDING_SIZE, "%s: %zu bytes for %s, whose type has %u",
                     kernel->name, bytes, argument->name, argument->element_size);
            right = false;
        }
    }
    for (size_t i = 0; i < MSL_MAX_BUFFERS; i++) {
        if (!encoder->bindings[i].fresh || declared[i]) continue;
        emu_find(METAL_EMU_BINDING_UNKNOWN, "%s has no argument at index %zu", kernel->name, i);
    }
    if (dynamic > MSL_TG_MEMORY) {
        emu_find(METAL_EMU_THREADGROUP_MEMORY, "%s: %zu bytes together, at most %d", kernel->name,
                 dynamic, MSL_TG_MEMORY);
        right = false;
    }
    return right;
}

static bool threads_suit(const struct emu_pipeline *pipeline, MTLSize threads) {
    size_t total = threads.width * threads.height * threads.depth;
    if (total > 0 && total <= pipeline->max_threads && total % MSL_SIMD_WIDTH == 0) return true;
    emu_find(METAL_EMU_THREADS, "%s: %zu, expected a multiple of %d up to %u",
             pipeline->kernel->name, total, MSL_SIMD_WIDTH, pipeline->max_threads);
    return false;
}

/* Copies the encoder's state into a new dispatch; the bindings stay for the next one. */
static struct emu_dispatch *snapshot(struct emu_encoder *encoder, MTLSize threads) {
    struct emu_dispatch *dispatch = calloc(1, sizeof *dispatch);
    if (!dispatch) abort();
    dispatch->pipeline = encoder->pipeline;
    dispatch->threads = threads;
    memcpy(dispatch->threadgroup, encoder->threadgroup, sizeof dispatch->threadgroup);
    emu_command_hold(encoder->commands, &encoder->pipeline->object);
    bool declared[MSL_MAX_BUFFERS] = {false};
    for (size_t i = 0; i < encoder->pipeline->kernel->binding_count; i++) {
        const msl_binding *argument = &encoder->pipeline->kernel->bindings[i];
        if (argument->kind != MSL_BIND_THREADGROUP) declared[argument->index] = true;
    }
    for (size_t i = 0; i < MSL_MAX_BUFFERS; i++) {
        struct emu_binding *from = &encoder->bindings[i], *to = &dispatch->bindings[i];
        if (!declared[i]) continue;
        *to = *from;
        if (from->buffer) emu_command_hold(encoder->commands, &from->buffer->object);
        if (!from->bytes) continue;
        to->bytes = aligned_alloc(256, (from->length + 255) / 256 * 256);
        if (!to->bytes) abort();
        memcpy(to->bytes, from->bytes, from->length);
    }
    return dispatch;
}

/* NULL, with a finding, when the dispatch would be wrong: it is left out. */
static struct emu_dispatch *new_dispatch(struct emu_encoder *encoder, MTLSize threads) {
    if (encoder->ended) {
        encoder_find_ended("a dispatch");
        return NULL;
    }
    if (!encoder->pipeline) {
        emu_find(METAL_EMU_PIPELINE_MISSING, "a dispatch has no pipeline state");
        return NULL;
    }
    bool suits = arguments_suit(encoder, encoder->pipeline->kernel);
    suits = threads_suit(encoder->pipeline, threads) && suits;
    for (size_t i = 0; i < MSL_MAX_BUFFERS; i++) encoder->bindings[i].fresh = false;
    if (!suits) return NULL;
    struct emu_dispatch *dispatch = snapshot(encoder, threads);
    emu_command_add(encoder->commands, EMU_DISPATCH)->dispatch = dispatch;
    encoder->anything_to_order = true;
    return dispatch;
}

static void encoder_dispatch(id self, SEL selector, MTLSize groups, MTLSize threads) {
    (void)selector;
    struct emu_encoder *encoder = (struct emu_encoder *)self;
    if (groups.width == 0 || groups.height == 0 || groups.depth == 0) {
        emu_find(METAL_EMU_GRID, "%lu x %lu x %lu threadgroups", groups.width, groups.height,
                 groups.depth);
        return;
    }
    struct emu_dispatch *dispatch = new_dispatch(encoder, threads);
    if (dispatch) dispatch->groups = groups;
}

static void encoder_dispatch_indirect(id self, SEL selector, id object, NSUInteger offset,
                                      MTLSize threads) {
    (void)selector;
    struct emu_encoder *encoder = (struct emu_encoder *)self;
    struct emu_buffer *buffer = (struct emu_buffer *)object;
    if (!emu_expect(object, &emu_buffer_class, "indirect grid")) return;
    if (offset % 4 != 0 || buffer->length < 12 || offset > buffer->length - 12) {
        emu_find(METAL_EMU_OFFSET, "indirect grid at %lu of %zu bytes", offset, buffer->length);
        return;
    }
    struct emu_dispatch *dispatch = new_dispatch(encoder, threads);
    if (!dispatch) return;
    dispatch->indirect = buffer;
    dispatch->indirect_offset = offset;
    emu_command_hold(encoder->commands, object);
}

/* ---- Barriers ---- */

static bool may_barrier(struct emu_encoder *encoder) {
    if (encoder->ended) {
        encoder_find_ended("a barrier");
        return false;
    }
    if (!encoder->concurrent) {
        emu_find(METAL_EMU_BARRIER, "in a serial encoder, where all dispatches are ordered");
        return false;
    }
    if (!encoder->anything_to_order) {
        emu_find(METAL_EMU_BARRIER, "no dispatch since the encoder's start or the last full one");
    }
    return true;
}

static void encoder_barrier_scope(id self, SEL selector, NSUInteger scope) {
    (void)selector;
    struct emu_encoder *encoder = (struct emu_encoder *)self;
    if (!may_barrier(encoder)) return;
    if (scope != MTLBarrierScopeBuffers) {
        emu_find(METAL_EMU_BARRIER, "scope %lu, expected buffers (1)", scope);
        return;
    }
    emu_command_add(encoder->commands, EMU_BARRIER_ALL);
    encoder->anything_to_order = false;
}

static void encoder_barrier_resources(id self, SEL selector, const id *resources,
                                      NSUInteger count) {
    (void)selector;
    struct emu_encoder *encoder = (struct emu_encoder *)self;
    if (!may_barrier(encoder)) return;
    if (count == 0) {
        emu_find(METAL_EMU_BARRIER, "lists no resource");
        return;
    }
    for (size_t i = 0; i < count; i++) {
        if (!emu_expect(resources[i], &emu_buffer_class, "memoryBarrierWithResources:")) return;
    }
    struct emu_command *command = emu_command_add(encoder->commands, EMU_BARRIER_LIST);
    command->list = calloc(count, sizeof *command->list);
    if (!command->list) abort();
    for (size_t i = 0; i < count; i++) {
        command->list[i] = (struct emu_buffer *)resources[i];
        emu_command_hold(encoder->commands, resources[i]);
    }
    command->count = count;
}

static void encoder_end(id self, SEL selector) {
    (void)selector;
    struct emu_encoder *encoder = (struct emu_encoder *)self;
    if (encoder->ended) {
        encoder_find_ended("endEncoding");
        return;
    }
    emu_command_add(encoder->commands, EMU_END);
    encoder->ended = true;
    encoder->commands->open = NULL;
}

static const struct emu_method methods[] = {
    EMU_METHOD("setComputePipelineState:", encoder_pipeline),
    EMU_METHOD("setBuffer:offset:atIndex:", encoder_buffer),
    EMU_METHOD("setBytes:length:atIndex:", encoder_bytes),
    EMU_METHOD("setThreadgroupMemoryLength:atIndex:", encoder_threadgroup),
    EMU_METHOD("dispatchThreadgroups:threadsPerThreadgroup:", encoder_dispatch),
    EMU_METHOD("dispatchThreadgroupsWithIndirectBuffer:indirectBufferOffset:"
               "threadsPerThreadgroup:",
               encoder_dispatch_indirect),
    EMU_METHOD("memoryBarrierWithScope:", encoder_barrier_scope),
    EMU_METHOD("memoryBarrierWithResources:count:", encoder_barrier_resources),
    EMU_METHOD("endEncoding", encoder_end),
    EMU_METHODS_END,
};
struct objc_class emu_encoder_class = {
    .object.isa = &emu_metaclass,
    .name = "MTLComputeCommandEncoder",
    .size = sizeof(struct emu_encoder),
    .methods = methods,
    .dealloc = encoder_dealloc,
};
