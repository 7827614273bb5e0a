// The entry points that -fsanitize=thread compiles into a kernel: ours, not the sanitizer's.
#include "internal.h"

#include <cstring>

using msl::checker_access;
using msl::machine;

#define SITE __builtin_return_address(0)

#define ACCESS(size)                                                                               \
    extern "C" void __tsan_read##size(void *p) {                                                   \
        checker_access((uintptr_t)p, size, false, false, SITE);                                    \
    }                                                                                              \
    extern "C" void __tsan_write##size(void *p) {                                                  \
        checker_access((uintptr_t)p, size, true, false, SITE);                                     \
    }                                                                                              \
    extern "C" void __tsan_unaligned_read##size(void *p) {                                         \
        checker_access((uintptr_t)p, size, false, false, SITE);                                    \
    }                                                                                              \
    extern "C" void __tsan_unaligned_write##size(void *p) {                                        \
        checker_access((uintptr_t)p, size, true, false, SITE);                                     \
    }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

extern "C" void __tsan_init() {}

// A call stack for each fiber: a fault inside the shim is shown at the kernel's line.
extern "C" void __tsan_func_entry(void *caller) {
    msl::Fiber *me = machine.current;
    if (me == nullptr) return;
    if (me->depth < sizeof me->calls / sizeof me->calls[0]) me->calls[me->depth] = caller;
    me->depth++;
}
extern "C" void __tsan_func_exit() {
    if (machine.current != nullptr && machine.current->depth > 0) machine.current->depth--;
}

extern "C" void *__tsan_memcpy(void *to, const void *from, size_t size) {
    checker_access((uintptr_t)from, size, false, false, SITE);
    checker_access((uintptr_t)to, size, true, false, SITE);
    return memcpy(to, from, size);
}
extern "C" void *__tsan_memmove(void *to, const void *from, size_t size) {
    checker_access((uintptr_t)from, size, false, false, SITE);
    checker_access((uintptr_t)to, size, true, false, SITE);
    return memmove(to, from, size);
}
extern "C" void *__tsan_memset(void *to, int value, size_t size) {
    checker_access((uintptr_t)to, size, true, false, SITE);
    return memset(to, value, size);
}

// Metal's atomics are 32 bits wide, and the shim makes them of these three.
extern "C" uint32_t __tsan_atomic32_load(const volatile uint32_t *p, int) {
    checker_access((uintptr_t)p, 4, false, true, SITE);
    return *p;
}
extern "C" void __tsan_atomic32_store(volatile uint32_t *p, uint32_t value, int) {
    checker_access((uintptr_t)p, 4, true, true, SITE);
    *p = value;
}
extern "C" uint32_t __tsan_atomic32_compare_exchange_val(volatile uint32_t *p, uint32_t expected,
                                                         uint32_t value, int, int) {
    checker_access((uintptr_t)p, 4, false, true, SITE);
    checker_access((uintptr_t)p, 4, true, true, SITE);
    uint32_t old = *p;
    if (old == expected) *p = value;
    return old;
}
