/* Checks of the two large fields of a chat request: the conversation and the tools. */
#ifndef LILY_SERVE_MESSAGES_H
#define LILY_SERVE_MESSAGES_H

#include <jansson.h>

#include "serve/api_error.h"

/* Both: 0, or -1 and a 400 that names the element by its path. */
int messages_check(const json_t *messages, struct api_error *err);
int tools_check(const json_t *tools, struct api_error *err);

#endif
