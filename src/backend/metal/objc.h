/* The part of the Objective-C runtime that the Metal host needs, seen from C.
 *
 * A message is a call of objc_msgSend through a pointer of the method's own C type, as the arm64
 * calling convention demands: a variadic or uncast call passes arguments in the wrong registers.
 * OBJC_SEND is the one place where that cast is made; mtl.h holds one typed function per method, so
 * that no other file casts. Declared here rather than included, since the host is compiled where no
 * macOS SDK exists; the declarations follow Apple's "Objective-C Runtime" reference.
 *
 * Ownership (Cocoa's rule): what a method named new... or copy... returns is the caller's, to be
 * released once; anything else lives until the innermost autorelease pool is popped. */
#ifndef LILY_BACKEND_METAL_OBJC_H
#define LILY_BACKEND_METAL_OBJC_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct objc_class *Class;
typedef struct objc_object *id;
typedef struct objc_selector *SEL;
typedef unsigned long NSUInteger;
typedef long NSInteger;

extern void objc_msgSend(void);
extern Class objc_getClass(const char *name);
extern SEL sel_registerName(const char *name);
extern id objc_retain(id object);    /* nil is allowed; returns its argument */
extern void objc_release(id object); /* nil is allowed */
extern void *objc_autoreleasePoolPush(void);
extern void objc_autoreleasePoolPop(void *pool);

/* As a pointer, since calling the declared function itself through another type is refused by gcc.
 */
static inline void (*objc_message(void))(void) {
    return objc_msgSend;
}

/* OBJC_SEND(result, argument types...)(receiver, selector, arguments...). No method used here
 * returns a structure, so objc_msgSend alone suffices on every architecture. */
/* clang-format off */
#define OBJC_SEND(...) \
    OBJC_SEND_PICK(__VA_ARGS__, OBJC_SEND_N, OBJC_SEND_N, OBJC_SEND_N, OBJC_SEND_N, OBJC_SEND_N, \
                   OBJC_SEND_0, 0)(__VA_ARGS__)
#define OBJC_SEND_PICK(a, b, c, d, e, f, name, ...) name
#define OBJC_SEND_0(result)                         ((result (*)(id, SEL))objc_message())
#define OBJC_SEND_N(result, ...)                    ((result (*)(id, SEL, __VA_ARGS__))objc_message())
/* clang-format on */

/* A selector is looked up once per place of use; a race between threads stores the same value. */
static inline SEL objc_selector_cached(_Atomic(SEL) *cache, const char *name) {
    SEL selector = atomic_load_explicit(cache, memory_order_relaxed);
    if (!selector) {
        selector = sel_registerName(name);
        atomic_store_explicit(cache, selector, memory_order_relaxed);
    }
    return selector;
}

/* Declares the local `selector` of the method with that name. */
#define OBJC_SELECTOR(name)                                                                        \
    static _Atomic(SEL) selector_cache;                                                            \
    SEL selector = objc_selector_cached(&selector_cache, name)

static inline bool objc_responds(id object, const char *name) {
    OBJC_SELECTOR("respondsToSelector:");
    return OBJC_SEND(bool, SEL)(object, selector, sel_registerName(name));
}

/* NSString from UTF-8, autoreleased; nil when the bytes are not UTF-8. */
static inline id ns_string(const char *utf8) {
    OBJC_SELECTOR("stringWithUTF8String:");
    return OBJC_SEND(id, const char *)((id)objc_getClass("NSString"), selector, utf8);
}

/* The text of an NSString; lives as long as the string. NULL for nil. */
static inline const char *ns_string_utf8(id string) {
    OBJC_SELECTOR("UTF8String");
    return OBJC_SEND(const char *)(string, selector);
}

static inline NSInteger ns_error_code(id error) {
    OBJC_SELECTOR("code");
    return OBJC_SEND(NSInteger)(error, selector);
}

/* What went wrong, for a person; lives until the pool is popped. NULL for nil. */
static inline const char *ns_error_text(id error) {
    OBJC_SELECTOR("localizedDescription");
    return ns_string_utf8(OBJC_SEND(id)(error, selector));
}

#endif
