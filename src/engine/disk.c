#include "engine/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* On disk, where /tmp may be memory. */
static const char PATTERN[] = "/var/tmp/lily-session-XXXXXX";

static int fault(const char *what, const char *help, lily_err *err) {
    return ERR(err, LILY_EIO,
               "session on disk, in /var/tmp: found an error while %s (%s), expected none; %s",
               what, strerror(errno), help);
}

int disk_new(int *fd, lily_err *err) {
    char path[sizeof PATTERN];
    memcpy(path, PATTERN, sizeof path);
    *fd = mkostemp(path, O_CLOEXEC); /* a program started meanwhile must not hold or read it */
    if (*fd < 0) return fault("making a file", "let this user write there and make room", err);
    unlink(path);
    return 0;
}

/* All of it to or from the file: a call may do a part, and 0 is the end of the file. */
static bool whole(int fd, off_t at, uint8_t *bytes, size_t n, bool put) {
    for (size_t done = 0; done < n;) {
        ssize_t part = put ? pwrite(fd, bytes + done, n - done, at + (off_t)done)
                           : pread(fd, bytes + done, n - done, at + (off_t)done);
        if (part < 0 && errno == EINTR) continue;
        if (part == 0) errno = EIO;
        if (part <= 0) return false;
        done += (size_t)part;
    }
    return true;
}

int disk_put(int fd, off_t at, const void *bytes, size_t n, lily_err *err) {
    return whole(fd, at, (uint8_t *)(uintptr_t)bytes, n, true)
               ? 0
               : fault("writing", "make room there", err);
}

int disk_get(int fd, off_t at, void *bytes, size_t n, lily_err *err) {
    return whole(fd, at, bytes, n, false) ? 0 : fault("reading", "check that disk", err);
}
