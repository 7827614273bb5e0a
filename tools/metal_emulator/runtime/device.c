/* MTLDevice, with the limits of the configured profile. */
#include "internal.h"

#include <stdlib.h>

static uint64_t working_set(void) {
    uint64_t memory = (uint64_t)emu_options.profile.memory_gib << 30;
    return memory <= (uint64_t)32 << 30 ? memory / 3 * 2 : memory / 4 * 3;
}

id MTLCreateSystemDefaultDevice(void) {
    if (emu_inject_nil("MTLCreateSystemDefaultDevice")) return NULL;
    emu_lock();
    if (emu_options.working_set == 0) emu_options.working_set = working_set();
    if (emu_options.max_buffer == 0) emu_options.max_buffer = working_set() / 4 * 3;
    struct emu_device *device = emu_new(&emu_device_class);
    device->name = (struct emu_string *)emu_string_new(emu_options.profile.name);
    emu_unlock();
    return &device->object;
}

static void device_dealloc(id self) {
    objc_release(&((struct emu_device *)self)->name->object);
}

static id device_name(id self, SEL selector) {
    (void)selector;
    return &((struct emu_device *)self)->name->object;
}

static uint64_t device_working_set(id self, SEL selector) {
    (void)self;
    (void)selector;
    return emu_options.working_set;
}

static NSUInteger device_max_buffer(id self, SEL selector) {
    (void)self;
    (void)selector;
    return emu_options.max_buffer;
}

static NSUInteger device_threadgroup_memory(id self, SEL selector) {
    (void)self;
    (void)selector;
    return MSL_TG_MEMORY;
}

static NSUInteger device_allocated(id self, SEL selector) {
    (void)self;
    (void)selector;
    return emu_allocated_bytes();
}

static bool device_supports(id self, SEL selector, NSInteger family) {
    (void)self;
    (void)selector;
    if (family == MTLGPUFamilyMetal4) return emu_options.profile.macos >= 2600;
    if (family == MTLGPUFamilyMetal3) return true;
    return family > 1000 && family <= emu_options.profile.apple_family;
}

static id device_new_queue(id self, SEL selector) {
    (void)self;
    (void)selector;
    return emu_queue_new();
}

static id device_new_event(id self, SEL selector) {
    (void)self;
    (void)selector;
    return emu_new(&emu_event_class);
}

static const struct emu_method methods[] = {
    EMU_METHOD("name", device_name),
    EMU_METHOD("recommendedMaxWorkingSetSize", device_working_set),
    EMU_METHOD("maxBufferLength", device_max_buffer),
    EMU_METHOD("maxThreadgroupMemoryLength", device_threadgroup_memory),
    EMU_METHOD("currentAllocatedSize", device_allocated),
    EMU_METHOD("supportsFamily:", device_supports),
    EMU_METHOD("newCommandQueue", device_new_queue),
    EMU_METHOD("newSharedEvent", device_new_event),
    EMU_METHOD("newBufferWithLength:options:", emu_device_new_buffer),
    EMU_METHOD("newBufferWithBytesNoCopy:length:options:deallocator:",
               emu_device_new_buffer_no_copy),
    EMU_METHOD("newLibraryWithSource:options:error:", emu_device_new_library),
    EMU_METHOD("newComputePipelineStateWithFunction:error:", emu_device_new_pipeline),
    EMU_METHODS_END,
};
struct objc_class emu_device_class = {
    .object.isa = &emu_metaclass,
    .name = "MTLDevice",
    .size = sizeof(struct emu_device),
    .methods = methods,
    .dealloc = device_dealloc,
};
