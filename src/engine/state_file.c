#include "engine/state_file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* On disk, where /tmp may be memory. */
static const char PATTERN[] = "/var/tmp/lily-states-XXXXXX";

void state_file_init(struct state_file *f, size_t bytes) {
    *f = (struct state_file){.fd = -1, .bytes = bytes};
}

void state_file_close(struct state_file *f) {
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
}

static int fault(const char *what, lily_err *err) {
    return ERR(err, LILY_EIO,
               "state checkpoints in /var/tmp: found an error while %s (%s), expected none; make "
               "room there",
               what, strerror(errno));
}

static int make(struct state_file *f, lily_err *err) {
    char path[sizeof PATTERN];
    memcpy(path, PATTERN, sizeof path);
    f->fd = mkstemp(path);
    if (f->fd < 0) return fault("making a file", err);
    unlink(path);
    return 0;
}

/* All of buffer to or from its place: a call may do a part, and 0 is the end of the file. */
static bool whole(const struct state_file *f, int32_t place, uint8_t *buffer, bool put) {
    off_t at = (off_t)place * (off_t)f->bytes;
    for (size_t done = 0; done < f->bytes;) {
        size_t rest = f->bytes - done;
        ssize_t n = put ? pwrite(f->fd, buffer + done, rest, at + (off_t)done)
                        : pread(f->fd, buffer + done, rest, at + (off_t)done);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = EIO;
        if (n <= 0) return false;
        done += (size_t)n;
    }
    return true;
}

int state_file_put(struct state_file *f, const struct backend *b, const struct backend_state *from,
                   int32_t *place, lily_err *err) {
    int32_t at = 0;
    int rc = f->fd < 0 ? make(f, err) : 0;
    if (rc) return rc;
    while (at < STATE_FILE_PLACES && f->used[at]) at++;
    if (at == STATE_FILE_PLACES) {
        return ERR(err, LILY_EIO, "state checkpoints on disk: found %d, expected fewer",
                   STATE_FILE_PLACES);
    }
    uint8_t *buffer = malloc(f->bytes);
    if (!buffer) return ERR_NOMEM(err, "state checkpoint");
    rc = b->state_export(from, buffer, err);
    if (!rc && !whole(f, at, buffer, true)) rc = fault("writing", err);
    free(buffer);
    if (rc) return rc;
    f->used[at] = true;
    *place = at;
    return 0;
}

int state_file_get(const struct state_file *f, const struct backend *b, int32_t place,
                   struct backend_state *to, lily_err *err) {
    uint8_t *buffer = malloc(f->bytes);
    if (!buffer) return ERR_NOMEM(err, "state checkpoint");
    int rc = whole(f, place, buffer, false) ? 0 : fault("reading", err);
    if (!rc) rc = b->state_import(to, buffer, err);
    free(buffer);
    return rc;
}

void state_file_drop(struct state_file *f, int32_t place) {
    f->used[place] = false;
}
