/* Another run of this program: measurements that must not touch each other get a process each. */
#ifndef LILY_CLI_CHILD_H
#define LILY_CLI_CHILD_H

#include "base/buf.h"
#include "base/err.h"

/* Runs this program with words (argv[1] on, ended by NULL) and collects its standard output. Where
 * it fails, err holds the last line that it wrote to standard error, without "lily: ", and the
 * result is LILY_EBUSY for want of a better code. A noted signal is passed on (LILY_ECANCELED). */
int child_run(const char *const *words, struct buf *out, lily_err *err);

#endif
