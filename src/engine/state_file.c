#include "engine/state_file.h"

#include <stdlib.h>
#include <unistd.h>

#include "engine/disk.h"

void state_file_init(struct state_file *f, size_t bytes) {
    *f = (struct state_file){.fd = -1, .bytes = bytes};
}

void state_file_close(struct state_file *f) {
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
}

/* The room on disk is given back as soon as nothing in the file is of use. */
static void close_if_unused(struct state_file *f) {
    for (int32_t i = 0; i < STATE_FILE_PLACES; i++) {
        if (f->used[i]) return;
    }
    state_file_close(f);
}

static off_t offset(const struct state_file *f, int32_t place) {
    return (off_t)place * (off_t)f->bytes;
}

int state_file_put(struct state_file *f, const struct backend *b, const struct backend_state *from,
                   int32_t *place, lily_err *err) {
    int32_t at = 0;
    int rc = f->fd < 0 ? disk_new(&f->fd, err) : 0;
    if (rc) return rc;
    while (at < STATE_FILE_PLACES && f->used[at]) at++;
    if (at == STATE_FILE_PLACES) {
        return ERR(err, LILY_EIO, "state checkpoints on disk: found %d, expected fewer",
                   STATE_FILE_PLACES);
    }
    uint8_t *buffer = malloc(f->bytes);
    rc = buffer ? b->state_export(from, buffer, err) : ERR_NOMEM(err, "state checkpoint");
    if (!rc) rc = disk_put(f->fd, offset(f, at), buffer, f->bytes, err);
    free(buffer);
    f->used[at] = !rc;
    *place = at;
    if (rc) close_if_unused(f);
    return rc;
}

int state_file_get(const struct state_file *f, const struct backend *b, int32_t place,
                   struct backend_state *to, lily_err *err) {
    uint8_t *buffer = malloc(f->bytes);
    if (!buffer) return ERR_NOMEM(err, "state checkpoint");
    int rc = disk_get(f->fd, offset(f, place), buffer, f->bytes, err);
    if (!rc) rc = b->state_import(to, buffer, err);
    free(buffer);
    return rc;
}

void state_file_drop(struct state_file *f, int32_t place) {
    f->used[place] = false;
    close_if_unused(f);
}
