/* A file without a name in /var/tmp, for what a session puts aside when memory is short: readable
 * by nobody else, gone with the process, never read by another run. */
#ifndef LILY_ENGINE_DISK_H
#define LILY_ENGINE_DISK_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "base/err.h"

/* *fd: the caller's, to be closed. LILY_EIO. */
int disk_new(int *fd, lily_err *err);
/* All of bytes[n] at an offset of the file. LILY_EIO. */
int disk_put(int fd, off_t at, const void *bytes, size_t n, lily_err *err);
int disk_get(int fd, off_t at, void *bytes, size_t n, lily_err *err);

#endif
