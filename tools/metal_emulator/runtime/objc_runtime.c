/* Classes, selectors, reference counts and autorelease pools of the emulated Objective-C runtime.
 */
#include "internal.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern void emu_nil_method(void); /* msg_send.S: returns 0 in every return register */

struct objc_class emu_metaclass = {.name = "Class"};

static Class const classes[] = {
    &emu_string_class,   &emu_error_class,    &emu_device_class,         &emu_queue_class,
    &emu_buffer_class,   &emu_options_class,  &emu_library_class,        &emu_constants_class,
    &emu_function_class, &emu_pipeline_class, &emu_command_buffer_class, &emu_encoder_class,
    &emu_event_class,
};
enum { CLASS_COUNT = sizeof classes / sizeof classes[0] };

static pthread_mutex_t lock;
static pthread_mutex_t selector_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t lock_once = PTHREAD_ONCE_INIT;
static SEL selectors;
static id objects; /* see struct objc_object */

static void lock_create(void) {
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &recursive);
    pthread_mutexattr_destroy(&recursive);
}

void emu_lock(void) {
    pthread_once(&lock_once, lock_create);
    pthread_mutex_lock(&lock);
}

void emu_unlock(void) {
    pthread_mutex_unlock(&lock);
}

SEL sel_registerName(const char *name) {
    pthread_mutex_lock(&selector_lock);
    SEL found = selectors;
    while (found && strcmp(found->name, name) != 0) found = found->next;
    if (!found) {
        size_t size = strlen(name) + 1;
        found = malloc(sizeof *found + size);
        if (!found) abort();
        memcpy(found->name, name, size);
        found->next = selectors;
        selectors = found;
    }
    pthread_mutex_unlock(&selector_lock);
    return found;
}

Class objc_getClass(const char *name) {
    for (size_t i = 0; i < CLASS_COUNT; i++) {
        if (strcmp(classes[i]->name, name) == 0) return classes[i];
    }
    return NULL;
}

/* ---- Methods that every object has ---- */

static id object_retain(id self, SEL selector) {
    (void)selector;
    return objc_retain(self);
}

static void object_release(id self, SEL selector) {
    (void)selector;
    objc_release(self);
}

static id object_autorelease(id self, SEL selector) {
    (void)selector;
    return emu_autorelease(self);
}

static const struct emu_method *find(const struct emu_method *table, const char *name) {
    if (!table) return NULL;
    for (; table->name; table++) {
        if (strcmp(table->name, name) == 0) return table;
    }
    return NULL;
}

static bool object_responds(id self, SEL selector, SEL asked);

static const struct emu_method object_methods[] = {
    EMU_METHOD("retain", object_retain),
    EMU_METHOD("release", object_release),
    EMU_METHOD("autorelease", object_autorelease),
    EMU_METHOD("respondsToSelector:", object_responds),
    EMU_METHODS_END,
};

/* Methods that older systems do not have. */
static bool too_new(const char *name) {
    return emu_options.profile.macos < 1500 &&
           (strcmp(name, "setMathMode:") == 0 ||
            strcmp(name, "setMathFloatingPointFunctions:") == 0);
}

static const struct emu_method *method_of(id receiver, const char *name) {
    if (too_new(name)) return NULL;
    if (receiver->isa == &emu_metaclass) return find(((Class)receiver)->class_methods, name);
    const struct emu_method *method = find(receiver->isa->methods, name);
    return method ? method : find(object_methods, name);
}

static bool object_responds(id self, SEL selector, SEL asked) {
    (void)selector;
    return method_of(self, asked->name) != NULL;
}

/* ---- Injection ---- */

static struct {
    atomic_bool armed;
    bool returned;
    uint32_t skip;
    char name[96];
} nil;

void metal_emu_inject_nil(const char *name, uint32_t skip) {
    emu_lock();
    snprintf(nil.name, sizeof nil.name, "%s", name);
    nil.skip = skip;
    nil.returned = false;
    atomic_store(&nil.armed, skip != UINT32_MAX);
    emu_unlock();
}

bool metal_emu_nil_returned(void) {
    return nil.returned;
}

bool emu_inject_nil(const char *name) {
    if (!atomic_load(&nil.armed)) return false;
    emu_lock();
    bool now = strcmp(name, nil.name) == 0 && nil.skip-- == 0;
    if (now) {
        nil.returned = true;
        atomic_store(&nil.armed, false);
    }
    emu_unlock();
    return now;
}

emu_imp emu_lookup(id receiver, SEL selector) {
    if (!receiver) return emu_nil_method;
    bool is_class = receiver->isa == &emu_metaclass;
    const char *class_name = is_class ? ((Class)receiver)->name : receiver->isa->name;
    if (!is_class && emu_is_dead(receiver)) {
        emu_fatal("-[%s %s] sent to a released object", class_name, selector->name);
    }
    const struct emu_method *method = method_of(receiver, selector->name);
    if (!method) {
        emu_fatal("unknown selector %c[%s %s]", is_class ? '+' : '-', class_name, selector->name);
    }
    return emu_inject_nil(selector->name) ? emu_nil_method : method->imp;
}

/* ---- Reference counts ---- */

void *emu_new(Class class) {
    id object = calloc(1, class->size);
    if (!object) abort();
    object->isa = class;
    atomic_init(&object->references, 1);
    emu_lock();
    object->older = objects;
    objects = object;
    emu_unlock();
    atomic_fetch_add(&class->live, 1);
    return object;
}

bool emu_is_dead(const void *object) {
    return atomic_load(&((const struct objc_object *)object)->references) <= 0;
}

id objc_retain(id object) {
    if (!object) return object;
    if (emu_is_dead(object)) emu_fatal("-[%s retain] sent to a released object", object->isa->name);
    atomic_fetch_add(&object->references, 1);
    return object;
}

void objc_release(id object) {
    if (!object) return;
    int before = atomic_fetch_sub(&object->references, 1);
    if (before <= 0) emu_fatal("-[%s release] sent to a released object", object->isa->name);
    if (before > 1) return;
    emu_lock();
    if (object->isa->dealloc) object->isa->dealloc(object);
    atomic_fetch_sub(&object->isa->live, 1);
    emu_unlock();
}

size_t metal_emu_live_objects(void) {
    long live = 0;
    for (size_t i = 0; i < CLASS_COUNT; i++) live += atomic_load(&classes[i]->live);
    return (size_t)live;
}

size_t metal_emu_check_leaks(void) {
    for (size_t i = 0; i < CLASS_COUNT; i++) {
        long live = atomic_load(&classes[i]->live);
        if (live > 0) emu_find(METAL_EMU_LEAK, "%ld x %s", live, classes[i]->name);
    }
    return metal_emu_live_objects();
}

/* ---- Autorelease pools: a stack of objects for each thread, with marks ---- */

struct pool {
    struct pool *outer;
    id *objects;
    size_t count, capacity;
};

static _Thread_local struct pool *innermost;

void *objc_autoreleasePoolPush(void) {
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool) abort();
    pool->outer = innermost;
    innermost = pool;
    return pool;
}

static void drain(struct pool *pool) {
    for (size_t i = 0; i < pool->count; i++) {
        if (emu_is_dead(pool->objects[i])) {
            emu_find(METAL_EMU_OVER_RELEASE, "%s was released by the host while its pool held it",
                     pool->objects[i]->isa->name);
        } else {
            objc_release(pool->objects[i]);
        }
    }
    free(pool->objects);
    free(pool);
}

void objc_autoreleasePoolPop(void *pool) {
    struct pool *wanted = pool, *found = innermost;
    while (found && found != wanted) found = found->outer;
    if (!found) {
        emu_find(METAL_EMU_POOL, "a pool was popped that is not in place on this thread");
        return;
    }
    if (innermost != wanted) {
        emu_find(METAL_EMU_POOL, "a pool was popped before the pools inside it");
    }
    while (found) { /* the pools inside it go too, as in the real runtime */
        struct pool *last = innermost;
        innermost = last->outer;
        if (last == wanted) found = NULL;
        drain(last);
    }
}

id emu_autorelease(id object) {
    struct pool *pool = innermost;
    if (!pool) {
        emu_find(METAL_EMU_POOL, "%s autoreleased with no pool in place: it leaks",
                 object->isa->name);
        return object;
    }
    if (pool->count == pool->capacity) {
        pool->capacity = pool->capacity ? 2 * pool->capacity : 64;
        pool->objects = realloc(pool->objects, pool->capacity * sizeof(id));
        if (!pool->objects) abort();
    }
    pool->objects[pool->count++] = object;
    return object;
}
