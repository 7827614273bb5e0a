/* A session at rest: when memory is short while nothing is asked, all that the backend holds of it
 * goes to disk (disk.h) and its memory is free until the next call. */
#ifndef LILY_ENGINE_REST_H
#define LILY_ENGINE_REST_H

#include "engine/session.h"

/* Puts the recurrent state and the rows of keys and values of the s->held tokens on disk and frees
 * the backend's session. After an error the session is as it was; lily_cancel ends it with
 * LILY_ECANCELED between pieces. */
int rest_begin(lily_session *s, lily_err *err);

/* Makes the backend's session anew and reads it back. LILY_ENOMEM: there is no room, or
 * LILY_ECANCELED by lily_cancel between pieces: it stays where it is. What cannot be read is
 * forgotten: the session is empty then, the log says so. */
int rest_end(lily_session *s, lily_err *err);

/* Forgets what is on disk. */
void rest_drop(lily_session *s);

#endif
