/* State checkpoints on disk (disk.h), for when memory is short: one file for all of a session. */
#ifndef LILY_ENGINE_STATE_FILE_H
#define LILY_ENGINE_STATE_FILE_H

#include <stdbool.h>
#include <stdint.h>

#include "backend/backend.h"

enum { STATE_FILE_PLACES = 32 };

struct state_file {
    int fd;       /* -1: there is none: the first put makes it, the last drop closes it */
    size_t bytes; /* of one checkpoint */
    bool used[STATE_FILE_PLACES];
};

void state_file_init(struct state_file *f, size_t bytes);
void state_file_close(struct state_file *f);

/* Writes a saved state; *place is where. Takes the memory of one copy for the time of the call.
 * LILY_ENOMEM, LILY_EIO (a full disk, or no place left). */
int state_file_put(struct state_file *f, const struct backend *b, const struct backend_state *from,
                   int32_t *place, lily_err *err);
/* Reads it into a state; it stays in the file until it is dropped. */
int state_file_get(const struct state_file *f, const struct backend *b, int32_t place,
                   struct backend_state *to, lily_err *err);
void state_file_drop(struct state_file *f, int32_t place);

#endif
