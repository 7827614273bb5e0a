/* The sockets: libmicrohttpd's daemon, connections with their deadlines, requests and replies. */
#ifndef LILY_SERVE_HTTP_H
#define LILY_SERVE_HTTP_H

#include <stddef.h>
#include <stdint.h>

#include "serve/server.h"

/* What a connection is doing, which decides how long it may take. */
enum conn_phase {
    CONN_HEAD,  /* idle or sending a request's head */
    CONN_BODY,  /* sending the body */
    CONN_WORK,  /* waiting for the model: no deadline */
    CONN_REPLY, /* being sent what is left of a finished reply */
};

/* Bytes a second below which a peer is taken for an attack or a broken line. */
#define CONN_MIN_RATE 4096

struct conn {
    struct server *server;
    struct conn *next, *prev;
    int fd;
    enum conn_phase phase;
    int64_t since_ns; /* when the phase began */
    uint64_t bytes;   /* received or to be sent in it */
};

/* Locked: enters a phase that moves so many bytes. */
void conn_phase(struct conn *c, enum conn_phase phase, uint64_t bytes);
/* Locked: when the phase should have ended, or INT64_MAX. */
int64_t conn_deadline(const struct conn *c);

/* Listens and starts libmicrohttpd's thread; *port is the port bound. */
int http_start(struct server *s, uint16_t *port, lily_err *err);
/* Accepts no more connections. */
void http_quiesce(struct server *s);
/* Ends the thread and all connections, after http_quiesce. All jobs are done. */
void http_stop(struct server *s);

#endif
