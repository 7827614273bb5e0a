/* Where errors are born. ERR() records file-independent text and returns the code, so that
 * `return ERR(err, LILY_EIO, "...")` is the only way an error starts; put a breakpoint in err_set.
 */
#ifndef LILY_BASE_ERR_H
#define LILY_BASE_ERR_H

#include "lily_error.h"

#if defined(__GNUC__)
#define PRINTF_LIKE(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define PRINTF_LIKE(fmt, args)
#endif

/* Fills err (which may be NULL) and returns code. Text beyond the buffer is cut, never overrun. */
int err_set(lily_err *err, int code, const char *fmt, ...) PRINTF_LIKE(3, 4);

/* Puts "<context>: " before the message of an error on its way up; returns err's code. */
int err_prefix(lily_err *err, int code, const char *fmt, ...) PRINTF_LIKE(3, 4);

/* Makes a message one line of UTF-8 that a terminal and a JSON document can show: what is cut
 * inside a character, is no UTF-8 or a control character becomes '?' (names come from files). */
void err_clean(char *msg);

/* The error of a system call on object: "<object>: cannot <verb>: <why>; <what to do>". */
int err_system(lily_err *err, int errno_value, const char *object, const char *verb);

/* The code that fits an errno value (ENOENT, EACCES, ENOSPC, ENOMEM, else LILY_EIO). */
int err_from_errno(int errno_value);

#define ERR(err, code, ...)  err_set((err), (code), __VA_ARGS__)
#define ERR_NOMEM(err, what) err_set((err), LILY_ENOMEM, "%s: out of memory", (what))

#endif
