/* What the server answers to: the table of paths and methods. */
#ifndef LILY_SERVE_ROUTES_H
#define LILY_SERVE_ROUTES_H

#include "serve/api_error.h"

enum route {
    ROUTE_NONE, /* not found, or not with this method: the error says which */
    ROUTE_INDEX,
    ROUTE_HEALTH,
    ROUTE_MODELS,
    ROUTE_MODEL, /* /v1/models/{id} */
    ROUTE_CHAT,
    ROUTE_OPTIONS, /* any known path: 204 with Allow */
};

/* *allow is the Allow header of a known path, else NULL; *rest what follows /v1/models/. */
enum route route_find(const char *method, const char *path, const char **allow, const char **rest,
                      struct api_error *err);

#endif
