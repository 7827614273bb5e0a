#include "engine/rest.h"

#include <stdlib.h>
#include <unistd.h>

#include "engine/disk.h"

enum { PIECE = 256 }; /* rows at a time: 5 MB of the real shape */

/* The state at the session's position, to or from the file's beginning. */
static int move_state(lily_session *s, bool put, lily_err *err) {
    const struct backend *b = s->engine->backend;
    struct rest *r = &s->rest;
    size_t bytes = b->state_bytes(s->engine->model);
    struct backend_state *state = NULL;
    void *buffer = malloc(bytes);
    int rc = buffer ? b->state_new(s->engine->model, &state, err) : ERR_NOMEM(err, "session");
    if (!rc && put) rc = b->state_save(s->backend, state, err);
    if (!rc && put) rc = b->state_export(state, buffer, err);
    if (!rc) {
        rc = put ? disk_put(r->fd, 0, buffer, bytes, err) : disk_get(r->fd, 0, buffer, bytes, err);
    }
    if (!rc && !put) rc = b->state_import(state, buffer, err);
    if (!rc && !put) rc = b->state_restore(s->backend, state, r->position, err);
    b->state_free(state);
    free(buffer);
    return rc;
}

/* Keys and values of the held tokens, behind the state. */
static int move_rows(lily_session *s, bool put, lily_err *err) {
    const struct backend *b = s->engine->backend;
    off_t at = (off_t)b->state_bytes(s->engine->model);
    void *buffer = malloc(b->kv_bytes(s->engine->model, PIECE));
    int rc = buffer ? 0 : ERR_NOMEM(err, "session");
    for (int32_t from = 0; from < s->held && !rc; from += PIECE) {
        if (session_cancelled(s)) {
            rc = ERR(err, LILY_ECANCELED, "session: cancelled %s disk at token %d of %d",
                     put ? "on its way to" : "on its way from", from, s->held);
            break;
        }
        int32_t n = s->held - from < PIECE ? s->held - from : PIECE;
        size_t bytes = b->kv_bytes(s->engine->model, n);
        if (put) {
            rc = b->kv_export(s->backend, from, n, buffer, err);
            if (!rc) rc = disk_put(s->rest.fd, at, buffer, bytes, err);
        } else {
            rc = disk_get(s->rest.fd, at, buffer, bytes, err);
            if (!rc) rc = b->kv_import(s->backend, from, n, buffer, err);
        }
        at += (off_t)bytes;
    }
    free(buffer);
    return rc;
}

void rest_drop(lily_session *s) {
    if (s->rest.on_disk) close(s->rest.fd);
    s->rest.on_disk = false;
}

int rest_begin(lily_session *s, lily_err *err) {
    struct rest *r = &s->rest;
    int rc = disk_new(&r->fd, err);
    if (rc) return rc;
    r->position = session_position(s);
    rc = move_state(s, true, err);
    if (!rc) rc = move_rows(s, true, err);
    if (rc) {
        close(r->fd);
        return rc;
    }
    s->engine->backend->session_free(s->backend);
    s->backend = NULL;
    r->on_disk = true;
    return 0;
}

int rest_end(lily_session *s, lily_err *err) {
    const struct backend *b = s->engine->backend;
    int rc = b->session_new(s->engine->model, s->context, &s->backend, err);
    if (rc) {
        s->backend = NULL;
        return rc;
    }
    if (!s->rest.on_disk) return 0; /* emptied meanwhile */
    rc = move_rows(s, false, err);
    if (!rc) rc = move_state(s, false, err);
    if (rc == LILY_ENOMEM || rc == LILY_ECANCELED) {
        b->session_free(s->backend);
        s->backend = NULL;
        return rc;
    }
    rest_drop(s);
    if (!rc) return 0;
    engine_log(s->engine, "session on disk: %s; it was emptied", err->msg);
    session_empty(s);
    return 0;
}
