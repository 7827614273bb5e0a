/* Where checks report what is wrong. A load stops at the first fault; an inspection collects every
 * fault and goes on. A check therefore reads:
 *
 *     if (bad) return fault(f, LILY_EFORMAT, "%s: found %d, expected %d; ...", ...);
 *
 * where a return of 0 means "noted, skip this object and continue". */
#ifndef LILY_CKPT_FAULTS_H
#define LILY_CKPT_FAULTS_H

#include <jansson.h>

#include "base/err.h"

struct faults {
    lily_err *err; /* the first fault of a load, or what made an inspection impossible */
    json_t *list;  /* array of strings of an inspection (borrowed); NULL for a load */
    size_t total;  /* noted in list, or beyond its bound */
    void (*warn)(void *arg, const char *line); /* may be NULL */
    void *warn_arg;
};

/* At most this many faults are listed in full, so that one lost shard stays readable. */
enum { FAULTS_LISTED = 100 };

/* Load: fills err, returns code. Inspection: notes the line, returns 0. */
int fault(struct faults *f, int code, const char *fmt, ...) PRINTF_LIKE(3, 4);

/* The same for an error that a function has already worded. */
int fault_from(struct faults *f, int code, const lily_err *err);

/* One line a user should read; nothing stops. */
void fault_warn(struct faults *f, const char *fmt, ...) PRINTF_LIKE(2, 3);

#endif
