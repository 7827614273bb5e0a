/* The watch over sockets and clocks, run by the caller of serve_run: clients that hang up while
 * their connection sleeps, keep-alive comments, deadlines of slow peers. */
#ifndef LILY_SERVE_WATCH_H
#define LILY_SERVE_WATCH_H

#include <stdatomic.h>

#include "serve/server.h"

/* Watches until the flag is set (and server_wake called). */
void watch_run(struct server *s, const atomic_int *stop);
/* One look at everything; also what ends running work while the server stops. */
void watch_once(struct server *s);

#endif
