/* The server about itself: /health, /v1/models and the index. Each returns a new reference. */
#ifndef LILY_SERVE_HEALTH_H
#define LILY_SERVE_HEALTH_H

#include <jansson.h>

#include "serve/server.h"

json_t *health_json(struct server *s); /* takes the lock for a moment */
json_t *models_json(const struct server *s);
/* NULL: no model of that name. */
json_t *model_json(const struct server *s, const char *id);

#endif
