/* Any body, through the server's own path: scan, parse, check; what is accepted must be usable. */
#include <stdlib.h>
#include <string.h>

#include "serve/request.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A check that is not compiled out. */
static void demand(bool holds) {
    if (!holds) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const struct request_limits limits = {.vocab = 100};
    struct api_error err = {0};
    struct chat_request *r = NULL;
    if (request_parse((const char *)data, size, &limits, &r, &err)) {
        demand(!r && err.status >= 400 && err.message[0]);
        json_t *json = api_error_json(&err);
        demand(json != NULL);
        json_decref(json);
        return 0;
    }
    json_t *messages = json_loads(r->messages, JSON_ALLOW_NUL, NULL);
    demand(json_array_size(messages) > 0);
    json_decref(messages);
    for (int32_t i = 0; i < r->sampling.n_bias; i++)
        demand(r->sampling.bias_ids[i] >= 0 && r->sampling.bias_ids[i] < limits.vocab);
    for (size_t i = 0; i < r->n_stops; i++) demand(r->stops[i][0] != 0);
    request_free(r);
    return 0;
}
