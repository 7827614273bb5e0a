#include "serve/api_error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "serve/json_safe.h"

int api_error_set(struct api_error *e, int status, const char *code, const char *param,
                  const char *fmt, ...) {
    /* Every 503 passes: a client should know that it may come again. */
    *e = (struct api_error){.status = status, .code = code, .retry_after = status == 503};
    snprintf(e->param, sizeof e->param, "%s", param ? param : "");
    va_list args;
    va_start(args, fmt);
    vsnprintf(e->message, sizeof e->message, fmt, args);
    va_end(args);
    return -1;
}

void api_error_context(struct api_error *e, size_t n_prompt, int32_t n_ctx) {
    /* Clients look for this sentence's words to start their own compaction. */
    api_error_set(e, 400, "context_length_exceeded", "messages",
                  "This model's maximum context length is %d tokens, but the prompt holds %zu "
                  "tokens; shorten the conversation or serve with a larger --ctx.",
                  (int)n_ctx, n_prompt);
    e->n_prompt = (int64_t)n_prompt;
    e->n_ctx = n_ctx;
}

/* An engine message begins with its object; when that is a path into the request, it is the
 * parameter at fault. */
static void param_of_message(struct api_error *e) {
    static const char *const roots[] = {"messages", "tools", "logit_bias"};
    for (size_t i = 0; i < sizeof roots / sizeof *roots; i++) {
        size_t n = strlen(roots[i]);
        if (strncmp(e->message, roots[i], n) || !strchr("[.:", e->message[n])) continue;
        size_t len = strcspn(e->message, ": ");
        if (len < sizeof e->param)
            snprintf(e->param, sizeof e->param, "%.*s", (int)len, e->message);
        return;
    }
}

void api_error_from_engine(struct api_error *e, const lily_err *err, size_t n_prompt,
                           int32_t n_ctx) {
    switch (err->code) {
    case LILY_EINVAL:
        api_error_set(e, 400, "invalid_value", NULL, "%s", err->msg);
        param_of_message(e);
        return;
    case LILY_ECONTEXT:
        api_error_context(e, n_prompt, n_ctx);
        return;
    case LILY_EBUSY:
    case LILY_ENOMEM:
    case LILY_EBACKEND:
        api_error_set(e, 503, "engine_unavailable", NULL, "%s", err->msg);
        return;
    default:
        api_error_set(e, 500, "engine_failed", NULL, "%s", err->msg);
    }
}

json_t *api_error_json(const struct api_error *e) {
    json_t *body = json_object();
    const char *type = e->status >= 500 ? "server_error" : "invalid_request_error";
    json_object_set_new(body, "message", jsafe_string(e->message, strlen(e->message)));
    json_object_set_new(body, "type", json_string(type));
    json_object_set_new(body, "param",
                        e->param[0] ? jsafe_string(e->param, strlen(e->param)) : json_null());
    json_object_set_new(body, "code", e->code ? json_string(e->code) : json_null());
    if (e->n_ctx) {
        json_object_set_new(body, "n_prompt_tokens", json_integer(e->n_prompt));
        json_object_set_new(body, "n_ctx", json_integer(e->n_ctx));
    }
    json_t *root = json_object();
    if (json_object_set_new(root, "error", body)) {
        json_decref(root);
        return NULL;
    }
    return root;
}
