/* MTLBuffer. While a committed command buffer uses a buffer, its pages are read-only to the CPU: a
 * write faults, is noted, and goes through. After release the pages allow nothing. The rule is
 * stricter than Metal's, which asks for disjoint bytes only: one buffer for what the CPU rewrites
 * while the GPU works, not a part of one. */
#include "internal.h"

#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 16384 }; /* of Apple silicon */
enum { SEEN = 64 };

static struct emu_buffer *buffers; /* all, dead ones too */
static size_t allocated;
_Thread_local volatile bool emu_in_kernel;
static struct sigaction previous;

/* Written by the fault handler, which may not allocate or format. */
static struct {
    struct emu_buffer *buffer;
    size_t offset;
} seen[SEEN];
static atomic_size_t seen_count;
static size_t seen_collected;

static const char *buffer_name(const struct emu_buffer *buffer) {
    return buffer->label ? buffer->label : "buffer without label";
}

static void complain(const char *text) {
    ssize_t ignored = write(STDERR_FILENO, text, strlen(text));
    (void)ignored;
}

static void on_fault(int signal, siginfo_t *info, void *context) {
    (void)context;
    uint8_t *at = info->si_addr;
    for (struct emu_buffer *b = buffers; b; b = b->next) {
        if (at < b->base || at >= b->base + b->mapped) continue;
        if (b->dead && b->owned) {
            complain("metal emulator: contents of a released buffer were touched\n");
            abort();
        }
        if (emu_in_kernel && !b->writable) {
            complain("metal emulator: a kernel writes to memory that the host mapped read-only\n");
            abort();
        }
        if (!b->protected) continue;
        mprotect(b->base, b->mapped, PROT_READ | PROT_WRITE);
        b->protected = false;
        if (emu_in_kernel) return; /* through another buffer over the same pages */
        size_t slot = atomic_fetch_add(&seen_count, 1);
        if (slot < SEEN) {
            seen[slot].buffer = b;
            seen[slot].offset = (size_t)(at - b->base);
        }
        return;
    }
    sigaction(signal, &previous, NULL); /* not ours: it faults again, as without the emulator */
}

void emu_buffers_collect_writes(void) {
    emu_lock();
    size_t count = atomic_load(&seen_count);
    if (count > SEEN) count = SEEN;
    for (; seen_collected < count; seen_collected++) {
        emu_find(METAL_EMU_CPU_WRITE, "%s at byte %zu, while a command buffer that uses it runs",
                 buffer_name(seen[seen_collected].buffer), seen[seen_collected].offset);
    }
    if (seen_collected == SEEN) {
        seen_collected = 0;
        atomic_store(&seen_count, 0);
    }
    emu_unlock();
}

/* Again before each use: a test framework may have put its own in place since. */
static void install_handler(void) {
    struct sigaction current;
    sigaction(SIGSEGV, NULL, &current);
    if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_fault) return;
    previous = current;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, NULL);
}

size_t emu_allocated_bytes(void) {
    return allocated;
}

/* May the CPU write to all of these pages? Memory of the host may be a read-only file mapping. */
static bool writable(const uint8_t *base, size_t length) {
    FILE *maps = fopen("/proc/self/maps", "r");
    if (!maps) return false;
    uintptr_t at = (uintptr_t)base, end = at + length, low, high;
    char line[512], rights[5];
    while (at < end && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &low, &high, rights) != 3) continue;
        if (at >= low && at < high && rights[1] == 'w') at = high;
    }
    fclose(maps);
    return at >= end;
}

static id buffer_new(uint8_t *base, size_t length, size_t mapped, bool owned, NSUInteger options) {
    struct emu_buffer *buffer = emu_new(&emu_buffer_class);
    buffer->base = base;
    buffer->length = length;
    buffer->mapped = mapped;
    buffer->owned = owned;
    buffer->writable = owned || writable(base, length);
    buffer->gpu_only = (options & MTLResourceStorageModePrivate) != 0;
    buffer->next = buffers;
    buffers = buffer;
    allocated += length;
    return &buffer->object;
}

static bool length_allowed(NSUInteger length) {
    uint64_t limit = emu_options.max_buffer;
    if (length > 0 && length <= limit) return true;
    emu_find(METAL_EMU_BUFFER_ARGUMENT, "length %lu, expected 1 to %" PRIu64, length, limit);
    return false;
}

id emu_device_new_buffer(id device, SEL selector, NSUInteger length, NSUInteger options) {
    (void)device;
    (void)selector;
    if (!length_allowed(length) || emu_inject_memory()) return NULL;
    size_t mapped = (length + PAGE - 1) / PAGE * PAGE;
    uint8_t *base = mmap(NULL, mapped, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return NULL;
    if (emu_options.fill) memset(base, 0xA5, length);
    emu_lock();
    id buffer = buffer_new(base, length, mapped, true, options);
    emu_unlock();
    return buffer;
}

id emu_device_new_buffer_no_copy(id device, SEL selector, void *bytes, NSUInteger length,
                                 NSUInteger options, id deallocator) {
    (void)device;
    (void)selector;
    if (!length_allowed(length) || emu_inject_memory()) return NULL;
    if ((uintptr_t)bytes % PAGE != 0 || length % PAGE != 0 || !bytes) {
        emu_find(METAL_EMU_BUFFER_ARGUMENT,
                 "bytesNoCopy at %p, %lu bytes: expected multiples of %d", bytes, length, PAGE);
        return NULL;
    }
    if (deallocator || (options & MTLResourceStorageModePrivate)) {
        emu_find(METAL_EMU_BUFFER_ARGUMENT, "bytesNoCopy: expected shared storage, no block");
        return NULL;
    }
    emu_lock();
    id buffer = buffer_new(bytes, length, length, false, options);
    emu_unlock();
    return buffer;
}

static void buffer_dealloc(id self) {
    struct emu_buffer *buffer = (struct emu_buffer *)self;
    install_handler();
    if (buffer->in_flight > 0) {
        emu_find(METAL_EMU_BUFFER_RELEASED, "%s: its command buffer holds no reference",
                 buffer_name(buffer));
    }
    if (buffer->owned) {
        madvise(buffer->base, buffer->mapped, MADV_DONTNEED);
        mprotect(buffer->base, buffer->mapped, PROT_NONE);
    } else if (buffer->protected) {
        mprotect(buffer->base, buffer->mapped, PROT_READ | PROT_WRITE);
    }
    buffer->protected = false;
    buffer->dead = true;
    allocated -= buffer->length;
}

static void protect(struct emu_buffer *buffer, bool on) {
    if (buffer->dead || !buffer->writable || buffer->protected == on) return;
    if (mprotect(buffer->base, buffer->mapped, on ? PROT_READ : PROT_READ | PROT_WRITE) == 0) {
        buffer->protected = on;
    }
}

/* Opens the command buffer's buffers for the GPU, or closes those still in flight again. */
void emu_buffers_protect(struct emu_command_buffer *commands, bool on) {
    for (size_t i = 0; i < commands->held_count; i++) {
        if (commands->held[i]->isa != &emu_buffer_class) continue;
        struct emu_buffer *buffer = (struct emu_buffer *)commands->held[i];
        protect(buffer, on && buffer->in_flight > 0);
    }
}

void emu_buffers_in_flight(struct emu_command_buffer *commands, bool begin) {
    install_handler();
    for (size_t i = 0; i < commands->held_count; i++) {
        if (commands->held[i]->isa != &emu_buffer_class) continue;
        struct emu_buffer *buffer = (struct emu_buffer *)commands->held[i];
        if (begin) {
            buffer->in_flight++;
        } else {
            buffer->in_flight--;
        }
        protect(buffer, buffer->in_flight > 0);
    }
}

static void *buffer_contents(id self, SEL selector) {
    (void)selector;
    struct emu_buffer *buffer = (struct emu_buffer *)self;
    return buffer->gpu_only ? NULL : buffer->base;
}

static NSUInteger buffer_length(id self, SEL selector) {
    (void)selector;
    return ((struct emu_buffer *)self)->length;
}

static void buffer_set_label(id self, SEL selector, id label) {
    (void)selector;
    emu_copy_label(&((struct emu_buffer *)self)->label, label);
}

static const struct emu_method methods[] = {
    EMU_METHOD("contents", buffer_contents),
    EMU_METHOD("length", buffer_length),
    EMU_METHOD("setLabel:", buffer_set_label),
    EMU_METHODS_END,
};
struct objc_class emu_buffer_class = {
    .object.isa = &emu_metaclass,
    .name = "MTLBuffer",
    .size = sizeof(struct emu_buffer),
    .methods = methods,
    .dealloc = buffer_dealloc,
};
