#include "serve/http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <limits.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include <microhttpd.h>

#include "base/clock.h"
#include "serve/exchange.h"

/* ---- connections ----------------------------------------------------------------------------- */

void conn_phase(struct conn *c, enum conn_phase phase, uint64_t bytes) {
    c->phase = phase;
    c->since_ns = clock_ns();
    c->bytes = bytes;
}

int64_t conn_deadline(const struct conn *c) {
    const uint64_t second = 1000000000u;
    uint64_t grace = (uint64_t)c->server->options.idle_seconds * second;
    if (c->phase == CONN_WORK) return INT64_MAX;
    return c->since_ns + (int64_t)(grace + c->bytes * (second / CONN_MIN_RATE));
}

static void conn_open(struct server *s, struct MHD_Connection *connection, void **context) {
    struct conn *c = calloc(1, sizeof *c);
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    *context = c;
    if (!c) return; /* the first request on it is refused */
    c->server = s;
    c->fd = info ? info->connect_fd : -1;
    pthread_mutex_lock(&s->lock);
    conn_phase(c, CONN_HEAD, 0);
    c->next = s->conns;
    if (c->next) c->next->prev = c;
    s->conns = c;
    s->n_conns++;
    server_wake(s);
    pthread_mutex_unlock(&s->lock);
}

static void conn_close(struct server *s, void **context) {
    struct conn *c = *context;
    if (!c) return;
    pthread_mutex_lock(&s->lock);
    if (c->prev) c->prev->next = c->next;
    if (c->next) c->next->prev = c->prev;
    if (s->conns == c) s->conns = c->next;
    s->n_conns--;
    pthread_mutex_unlock(&s->lock);
    free(c);
    *context = NULL;
}

static void notify_connection(void *cls, struct MHD_Connection *connection, void **context,
                              enum MHD_ConnectionNotificationCode code) {
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        conn_open(cls, connection, context);
    } else {
        conn_close(cls, context);
    }
}

/* ---- listening ------------------------------------------------------------------------------- */

static bool is_loopback(const struct sockaddr *a) {
    if (a->sa_family == AF_INET) {
        struct sockaddr_in v4;
        memcpy(&v4, a, sizeof v4);
        return ntohl(v4.sin_addr.s_addr) >> 24 == 127;
    }
    struct sockaddr_in6 v6;
    memcpy(&v6, a, sizeof v6);
    return a->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
}

/* What to do about it depends on what is wrong: the port, the right to it, or the address. */
static int bind_error(const struct server *s, int fault, lily_err *err) {
    const char *remedy =
        fault == EADDRINUSE ? "expected a free port; stop what listens there or "
                              "choose another --port"
        : fault == EACCES   ? "expected a port that this user may open; choose a --port above 1023"
        : fault == EADDRNOTAVAIL ? "expected an address of this machine; choose another --host"
                                 : "expected to listen there; choose another --host or --port";
    return ERR(err, fault == EADDRINUSE ? LILY_EBUSY : err_from_errno(fault),
               "%s port %d: found %s, %s", s->options.host, (int)s->options.port, strerror(fault),
               remedy);
}

static int listen_on(struct server *s, const struct addrinfo *a, int *out, lily_err *err) {
    int one = 1, fd = socket(a->ai_family, SOCK_STREAM, 0);
    if (fd < 0) return ERR(err, err_from_errno(errno), "socket: %s", strerror(errno));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, a->ai_addr, a->ai_addrlen) || listen(fd, 128)) {
        int rc = bind_error(s, errno, err);
        close(fd);
        return rc;
    }
    s->loopback = is_loopback(a->ai_addr);
    *out = fd;
    return 0;
}

static int open_listener(struct server *s, int *fd, lily_err *err) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *found = NULL;
    char port[8];
    snprintf(port, sizeof port, "%d", (int)s->options.port);
    /* "localhost" is the loopback in any spelling, also on a machine without a hosts file (RFC
     * 6761, 6.3). It may resolve to both families; most clients try IPv4 first. */
    const char *host = s->options.host;
    if (!strcasecmp(host, "localhost")) host = "127.0.0.1";
    int fault = getaddrinfo(host, port, &hints, &found);
    if (fault) {
        return ERR(err, LILY_EINVAL, "--host \"%s\": found %s, expected an address of this machine",
                   s->options.host, gai_strerror(fault));
    }
    int rc = listen_on(s, found, fd, err);
    freeaddrinfo(found);
    return rc;
}

static uint16_t bound_port(int fd) {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
        struct sockaddr_storage room;
    } a;
    socklen_t n = sizeof a;
    memset(&a, 0, sizeof a);
    if (getsockname(fd, &a.any, &n)) return 0;
    return ntohs(a.any.sa_family == AF_INET6 ? a.v6.sin6_port : a.v4.sin_port);
}

/* ---- daemon ---------------------------------------------------------------------------------- */

/* libmicrohttpd reports peers that misbehave; the access log already tells what matters. */
static void discard_log(void *arg, const char *format, va_list args) {
    (void)arg;
    (void)format;
    (void)args;
}

int http_start(struct server *s, uint16_t *port, lily_err *err) {
    int fd = -1;
    int rc = open_listener(s, &fd, err);
    if (rc) return rc;
    *port = bound_port(fd);
    /* One thread and poll: a few hundred connections, each of which mostly waits. */
    const unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL | MHD_USE_ERROR_LOG |
                           MHD_ALLOW_SUSPEND_RESUME;
    s->daemon = MHD_start_daemon(
        flags, *port, NULL, NULL, exchange_handle, s, MHD_OPTION_EXTERNAL_LOGGER, discard_log, NULL,
        MHD_OPTION_LISTEN_SOCKET, (MHD_socket)fd, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)s->options.max_connections, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)s->options.idle_seconds, MHD_OPTION_NOTIFY_COMPLETED, exchange_completed, s,
        MHD_OPTION_NOTIFY_CONNECTION, notify_connection, s, MHD_OPTION_END);
    /* On failure libmicrohttpd has closed the socket. */
    if (!s->daemon) return ERR(err, LILY_EIO, "server: libmicrohttpd could not start its thread");
    return 0;
}

void http_quiesce(struct server *s) {
    s->listener = MHD_quiesce_daemon(s->daemon);
    if (s->listener >= 0) shutdown(s->listener, SHUT_RDWR);
}

void http_stop(struct server *s) {
    MHD_stop_daemon(s->daemon);
    s->daemon = NULL;
    if (s->listener >= 0) close(s->listener); /* only now: the thread polled it until here */
}
