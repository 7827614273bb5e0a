/* Who may ask: protection against pages in a browser on the same machine. A page can make the
 * browser send requests to 127.0.0.1 under its own Origin, or under a name of its own that it lets
 * point there (DNS rebinding); the headers give both away. */
#ifndef LILY_SERVE_GUARD_H
#define LILY_SERVE_GUARD_H

#include <stdbool.h>

/* Host header, port and brackets allowed: names this machine (localhost, *.localhost, 127.0.0.0/8,
 * ::1) or the configured host. */
bool guard_host_is_local(const char *host, const char *configured);

/* Origin header (NULL: not from a page): the very server the request went to. */
bool guard_origin_is_own(const char *origin, const char *host);

#endif
