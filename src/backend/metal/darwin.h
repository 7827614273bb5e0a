/* The two C interfaces of macOS beside Metal that the host uses: libdispatch's memory-pressure
 * source and sysctl. Declared here rather than included, as in objc.h and for the same reason; the
 * declarations follow Apple's "Dispatch" reference and the sysctl(3) manual page. */
#ifndef LILY_BACKEND_METAL_DARWIN_H
#define LILY_BACKEND_METAL_DARWIN_H

#include <stddef.h>
#include <stdint.h>

typedef struct dispatch_source_s *dispatch_source_t;
typedef struct dispatch_queue_s *dispatch_queue_t;
typedef struct dispatch_source_type_s dispatch_source_type;

extern const dispatch_source_type _dispatch_source_type_memorypressure;

enum { /* what a memory-pressure source is asked for, and what its data holds: one or more */
       DISPATCH_MEMORYPRESSURE_NORMAL = 1,
       DISPATCH_MEMORYPRESSURE_WARN = 2,
       DISPATCH_MEMORYPRESSURE_CRITICAL = 4
};

/* The caller's to release; suspended until resumed. Queue NULL: one of the system's own, so that
 * handlers run on other threads, one at a time. NULL when the type is not known. */
extern dispatch_source_t dispatch_source_create(const dispatch_source_type *type, uintptr_t handle,
                                                uintptr_t mask, dispatch_queue_t queue);
extern void dispatch_set_context(dispatch_source_t source, void *context);
/* Called with the context: on each event; once, when the source is cancelled and no event handler
 * runs any more. */
extern void dispatch_source_set_event_handler_f(dispatch_source_t source, void (*handler)(void *));
extern void dispatch_source_set_cancel_handler_f(dispatch_source_t source, void (*handler)(void *));
extern void dispatch_resume(dispatch_source_t source);
extern uintptr_t dispatch_source_get_data(dispatch_source_t source); /* in an event handler */
extern void dispatch_source_cancel(dispatch_source_t source);
extern void dispatch_release(dispatch_source_t source);

/* 0, or -1; at most *size bytes into old, and *size becomes their number. */
extern int sysctlbyname(const char *name, void *old, size_t *size, void *new_value,
                        size_t new_size);

#endif
