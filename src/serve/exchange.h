/* One HTTP request and its reply, as libmicrohttpd drives it. */
#ifndef LILY_SERVE_EXCHANGE_H
#define LILY_SERVE_EXCHANGE_H

#include <microhttpd.h>

#include "serve/server.h"

/* libmicrohttpd's access handler: called with the head, with each piece of the body, at its end,
 * and again when a connection that waited for a job is resumed. cls is the struct server. */
enum MHD_Result exchange_handle(void *cls, struct MHD_Connection *connection, const char *url,
                                const char *method, const char *version, const char *data,
                                size_t *n_data, void **state);

/* libmicrohttpd's notice that a request is over, however it ended. */
void exchange_completed(void *cls, struct MHD_Connection *connection, void **state,
                        enum MHD_RequestTerminationCode code);

#endif
