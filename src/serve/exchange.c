#include "serve/exchange.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/buf.h"
#include "base/clock.h"
#include "serve/access_log.h"
#include "serve/guard.h"
#include "serve/health.h"
#include "serve/http.h"
#include "serve/job.h"
#include "serve/json_safe.h"
#include "serve/routes.h"
#include "serve/sse.h"

/* A body that will be refused is read to its end and dropped, so that a client that sends before
 * it reads sees the reply and not a reset; up to so many times the allowed size. */
#define DRAIN_FACTOR 4

struct exchange {
    struct server *server;
    struct conn *conn;
    char method[16], path[256];
    enum route route;
    const char *allow;              /* static; NULL: unknown path */
    char name[SERVER_MAX_NAME + 1]; /* of /v1/models/{name} */
    struct api_error error;         /* status set: what will be answered; the body is dropped */
    struct buf body;
    size_t held;       /* bytes of body counted in server.held_bytes */
    uint64_t received; /* of the body, kept or dropped */
    struct job *job;
    bool unframed; /* where the body ends is not known: answered without reading it */
    int status;    /* of the reply queued, 0: none yet */
    int64_t started_ns;
};

/* Locked. */
static void drop_body(struct exchange *x) {
    buf_free(&x->body);
    x->server->held_bytes -= x->held;
    x->held = 0;
}

/* ---- replies --------------------------------------------------------------------------------- */

static void add_headers(const struct exchange *x, struct MHD_Response *r, const char *type) {
    char number[16];
    MHD_add_response_header(r, MHD_HTTP_HEADER_CONTENT_TYPE, type);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    if (x->allow && (x->error.status == 405 || x->route == ROUTE_OPTIONS))
        MHD_add_response_header(r, MHD_HTTP_HEADER_ALLOW, x->allow);
    if (x->error.retry_after) {
        snprintf(number, sizeof number, "%d", (int)x->error.retry_after);
        MHD_add_response_header(r, MHD_HTTP_HEADER_RETRY_AFTER, number);
    }
    if (x->job) MHD_add_response_header(r, "X-Request-Id", x->job->id);
}

/* Queues bytes (taken over) as the whole reply. */
static enum MHD_Result send_bytes(struct exchange *x, struct MHD_Connection *connection, int status,
                                  const char *type, struct buf *bytes) {
    size_t n = bytes->len;
    char *data = buf_take(bytes);
    if (!data) return MHD_NO;
    struct MHD_Response *r = MHD_create_response_from_buffer(n, data, MHD_RESPMEM_MUST_FREE);
    if (!r) {
        free(data);
        return MHD_NO;
    }
    add_headers(x, r, type);
    x->status = status;
    pthread_mutex_lock(&x->server->lock);
    if (x->conn) conn_phase(x->conn, CONN_REPLY, n);
    pthread_mutex_unlock(&x->server->lock);
    enum MHD_Result rc = MHD_queue_response(connection, (unsigned)status, r);
    MHD_destroy_response(r);
    return rc;
}

static enum MHD_Result send_json(struct exchange *x, struct MHD_Connection *connection, int status,
                                 json_t *value) {
    struct buf bytes = {0};
    bool ok = jsafe_write(&bytes, value);
    json_decref(value);
    if (ok) return send_bytes(x, connection, status, "application/json", &bytes);
    buf_free(&bytes);
    return MHD_NO;
}

static enum MHD_Result send_error(struct exchange *x, struct MHD_Connection *connection) {
    return send_json(x, connection, x->error.status, api_error_json(&x->error));
}

/* The body of a streamed reply; cls is the job. Called while the connection lives. */
static ssize_t read_stream(void *cls, uint64_t at, char *out, size_t room) {
    struct job *job = cls;
    (void)at;
    pthread_mutex_lock(&job->server->lock);
    size_t n = job_unread(job);
    ssize_t rc;
    if (job->gone) {
        rc = MHD_CONTENT_READER_END_WITH_ERROR;
    } else if (n) {
        n = n < room ? n : room;
        memcpy(out, job->out.data + job->out_read, n);
        job->out_read += n;
        rc = (ssize_t)n;
    } else if (job->state == JOB_DONE) {
        rc = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        job->suspended = true;
        MHD_suspend_connection(job->connection);
        rc = 0;
    }
    pthread_mutex_unlock(&job->server->lock);
    return rc;
}

static enum MHD_Result send_stream(struct exchange *x, struct MHD_Connection *connection) {
    struct MHD_Response *r =
        MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, read_stream, x->job, NULL);
    if (!r) return MHD_NO;
    add_headers(x, r, SSE_CONTENT_TYPE);
    MHD_add_response_header(r, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
    MHD_add_response_header(r, "X-Accel-Buffering", "no");
    x->status = 200;
    enum MHD_Result rc = MHD_queue_response(connection, 200, r);
    MHD_destroy_response(r);
    return rc;
}

/* ---- chat completions ------------------------------------------------------------------------ */

/* Hands the body over; the connection sleeps until the job has something to say. */
static bool submit(struct exchange *x, struct MHD_Connection *connection) {
    struct server *s = x->server;
    pthread_mutex_lock(&s->lock);
    struct job *job = job_submit(s, &x->body, x->held, &x->error);
    if (job) {
        x->job = job;
        x->held = 0;
        job->connection = connection;
        job->conn = x->conn;
        job->fd = x->conn->fd;
        conn_phase(x->conn, CONN_WORK, 0);
        job->suspended = true;
        MHD_suspend_connection(connection);
        pthread_cond_broadcast(&s->work);
        server_wake(s);
    } else {
        drop_body(x);
    }
    pthread_mutex_unlock(&s->lock);
    return job != NULL;
}

static enum MHD_Result answer_chat(struct exchange *x, struct MHD_Connection *connection) {
    struct job *job = x->job;
    struct buf whole = {0};
    if (!job) return submit(x, connection) ? MHD_YES : send_error(x, connection);
    pthread_mutex_lock(&job->server->lock);
    bool gone = job->gone, stream = job_streams(job), ready = job->ready;
    if (!ready && !gone) { /* woken for nothing */
        job->suspended = true;
        MHD_suspend_connection(connection);
    } else if (!gone && !stream) {
        x->error = job->error;
        whole = job->out;
        job->out = (struct buf){0};
    }
    pthread_mutex_unlock(&job->server->lock);
    if (gone) return MHD_NO;
    if (!ready) return MHD_YES;
    if (stream) return send_stream(x, connection);
    if (x->error.status) return send_error(x, connection);
    return send_bytes(x, connection, 200, "application/json", &whole);
}

/* ---- the other routes ------------------------------------------------------------------------ */

static enum MHD_Result answer_index(struct exchange *x, struct MHD_Connection *connection) {
    const struct server *s = x->server;
    struct buf line = {0};
    if (!buf_printf(&line, "lily %s: %s on %s; OpenAI-compatible API under /v1, state at /health\n",
                    LILY_VERSION, s->model, s->info.backend))
        return MHD_NO;
    return send_bytes(x, connection, 200, "text/plain; charset=utf-8", &line);
}

static enum MHD_Result answer_model(struct exchange *x, struct MHD_Connection *connection) {
    json_t *card = model_json(x->server, x->name);
    if (card) return send_json(x, connection, 200, card);
    api_error_set(&x->error, 404, "model_not_found", "model",
                  "model: found \"%s\", expected \"%s\", the one served here", x->name,
                  x->server->model);
    return send_error(x, connection);
}

static enum MHD_Result answer(struct exchange *x, struct MHD_Connection *connection) {
    struct buf none = {0};
    if (x->error.status) return send_error(x, connection);
    switch (x->route) {
    case ROUTE_INDEX:
        return answer_index(x, connection);
    case ROUTE_HEALTH:
        return send_json(x, connection, 200, health_json(x->server));
    case ROUTE_MODELS:
        return send_json(x, connection, 200, models_json(x->server));
    case ROUTE_MODEL:
        return answer_model(x, connection);
    case ROUTE_OPTIONS:
        return send_bytes(x, connection, 204, "text/plain; charset=utf-8", &none);
    case ROUTE_CHAT:
        return answer_chat(x, connection);
    default:
        return MHD_NO;
    }
}

/* ---- the head -------------------------------------------------------------------------------- */

static const char *header(struct MHD_Connection *connection, const char *name) {
    return MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name);
}

/* How often the headers stand in the head by which a reader finds the body's end, or the server. */
struct framing {
    int hosts, lengths, codings;
};

static enum MHD_Result count_framing(void *cls, enum MHD_ValueKind kind, const char *name,
                                     const char *value) {
    struct framing *f = cls;
    (void)kind;
    (void)value;
    f->hosts += !strcasecmp(name, MHD_HTTP_HEADER_HOST);
    f->lengths += !strcasecmp(name, MHD_HTTP_HEADER_CONTENT_LENGTH);
    f->codings += !strcasecmp(name, MHD_HTTP_HEADER_TRANSFER_ENCODING);
    return MHD_YES;
}

/* A head that a proxy in front might read otherwise than libmicrohttpd does, or whose body would be
 * taken for JSON and is not; true: fine. */
static bool check_framing(struct exchange *x, struct MHD_Connection *connection) {
    struct framing f = {0};
    const char *transfer = header(connection, MHD_HTTP_HEADER_TRANSFER_ENCODING);
    const char *content = header(connection, MHD_HTTP_HEADER_CONTENT_ENCODING);
    MHD_get_connection_values(connection, MHD_HEADER_KIND, count_framing, &f);
    if (f.hosts > 1 || f.lengths + f.codings > 1) {
        x->unframed = true;
        api_error_set(
            &x->error, 400, "invalid_head", NULL,
            "head: found Host, or Content-Length and Transfer-Encoding, %d times, expected "
            "each once and one of the latter",
            f.hosts > 1 ? f.hosts : f.lengths + f.codings);
    } else if (transfer && strcasecmp(transfer, "chunked")) {
        x->unframed = true;
        api_error_set(&x->error, 501, "unsupported_encoding", NULL,
                      "Transfer-Encoding: found \"%.40s\", expected chunked or none", transfer);
    } else if (content && strcasecmp(content, "identity")) {
        api_error_set(&x->error, 415, "unsupported_encoding", NULL,
                      "Content-Encoding: found \"%.40s\", expected none; send the body as it is",
                      content);
    }
    return !x->error.status;
}

/* Fills x->error when the request is not to be served. */
static void check_head(struct exchange *x, struct MHD_Connection *connection, const char *version) {
    const struct server *s = x->server;
    const char *host = header(connection, MHD_HTTP_HEADER_HOST);
    const char *origin = header(connection, MHD_HTTP_HEADER_ORIGIN);
    const char *rest = "";
    if (!x->conn) {
        api_error_set(&x->error, 503, "out_of_memory", NULL, "server: out of memory");
        return;
    }
    if (!check_framing(x, connection)) return;
    if (!host && strcmp(version, MHD_HTTP_VERSION_1_0)) {
        api_error_set(&x->error, 400, "missing_host", NULL, "Host: found no such header");
        return;
    }
    if (host && s->loopback && !guard_host_is_local(host, s->options.host)) {
        api_error_set(&x->error, 403, "forbidden_host", NULL,
                      "Host: found \"%.80s\", expected localhost or the address served; a page "
                      "elsewhere may not reach this server under its own name",
                      host);
        return;
    }
    if (!guard_origin_is_own(origin, host)) {
        api_error_set(&x->error, 403, "forbidden_origin", NULL,
                      "Origin: found \"%.80s\", expected none or the server's own; pages of other "
                      "sites may not use this server",
                      origin);
        return;
    }
    x->route = route_find(x->method, x->path, &x->allow, &rest, &x->error);
    snprintf(x->name, sizeof x->name, "%s", rest);
}

static void refuse_size(struct exchange *x) {
    if (x->error.status) return;
    api_error_set(&x->error, 413, "request_too_large", NULL,
                  "body: found more than the %zu bytes that this server accepts; shorten the "
                  "request or serve with a larger --max-body",
                  x->server->options.max_body);
}

/* Looks at the announced length. True: the body is not even worth dropping. */
static bool check_length(struct exchange *x, struct MHD_Connection *connection) {
    const char *length = header(connection, MHD_HTTP_HEADER_CONTENT_LENGTH);
    const char *expect = header(connection, MHD_HTTP_HEADER_EXPECT);
    unsigned long long n = length ? strtoull(length, NULL, 10) : 0;
    if (n > x->server->options.max_body) refuse_size(x);
    if (!x->error.status) return false;
    return x->unframed || n / DRAIN_FACTOR > x->server->options.max_body ||
           (expect && !strcasecmp(expect, "100-continue"));
}

static enum MHD_Result begin(struct server *s, struct MHD_Connection *connection, const char *url,
                             const char *method, const char *version, void **state) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    struct exchange *x = calloc(1, sizeof *x);
    if (!x) return MHD_NO;
    *state = x;
    x->server = s;
    x->conn = info ? info->socket_context : NULL;
    x->started_ns = clock_ns();
    snprintf(x->method, sizeof x->method, "%s", method);
    snprintf(x->path, sizeof x->path, "%s", url);
    check_head(x, connection, version);
    if (x->conn) {
        pthread_mutex_lock(&s->lock);
        conn_phase(x->conn, CONN_BODY, 0);
        pthread_mutex_unlock(&s->lock);
    }
    return check_length(x, connection) ? send_error(x, connection) : MHD_YES;
}

/* ---- the body -------------------------------------------------------------------------------- */

/* Keeps the piece, or notes why not (locked). */
static void keep_piece(struct exchange *x, const char *data, size_t n) {
    struct server *s = x->server;
    if (x->received > s->options.max_body) refuse_size(x);
    if (x->error.status) {
        drop_body(x);
        return;
    }
    if (x->route != ROUTE_CHAT) return; /* a body where none is expected */
    bool kept = buf_append(&x->body, data, n);
    s->held_bytes += x->body.cap - x->held;
    x->held = x->body.cap;
    if (kept && s->held_bytes <= server_memory_limit(s)) return;
    api_error_set(&x->error, 503, "overloaded", NULL,
                  "server: the memory for requests is in use; try again later");
    x->error.retry_after = server_retry_after(s);
    s->totals.refused++;
    drop_body(x);
}

static enum MHD_Result take_body(struct exchange *x, const char *data, size_t *n_data) {
    struct server *s = x->server;
    x->received += *n_data;
    pthread_mutex_lock(&s->lock);
    if (x->conn) x->conn->bytes = x->received;
    keep_piece(x, data, *n_data);
    pthread_mutex_unlock(&s->lock);
    *n_data = 0;
    return x->received / DRAIN_FACTOR > s->options.max_body ? MHD_NO : MHD_YES;
}

/* ---- libmicrohttpd's side -------------------------------------------------------------------- */

enum MHD_Result exchange_handle(void *cls, struct MHD_Connection *connection, const char *url,
                                const char *method, const char *version, const char *data,
                                size_t *n_data, void **state) {
    struct exchange *x = *state;
    if (!x) return begin(cls, connection, url, method, version, state);
    if (*n_data) return take_body(x, data, n_data);
    return answer(x, connection);
}

void exchange_completed(void *cls, struct MHD_Connection *connection, void **state,
                        enum MHD_RequestTerminationCode code) {
    struct server *s = cls;
    struct exchange *x = *state;
    (void)connection;
    if (!x) return;
    *state = NULL;
    pthread_mutex_lock(&s->lock);
    drop_body(x);
    if (x->conn) conn_phase(x->conn, CONN_HEAD, 0);
    if (x->job) {
        x->job->connection = NULL;
        x->job->conn = NULL;
        x->job->fd = -1;
        x->job->suspended = false;
        job_hang_up(x->job); /* does nothing to a job that is done */
        job_unref(x->job);
    }
    pthread_mutex_unlock(&s->lock);
    if (!x->job && !s->options.quiet) {
        bool whole = code == MHD_REQUEST_TERMINATED_COMPLETED_OK && x->status;
        access_log_line(x->method, x->path, whole ? x->status : ACCESS_GONE,
                        clock_ns() - x->started_ns);
    }
    free(x);
}
