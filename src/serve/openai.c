#include "serve/openai.h"

#include "serve/json_safe.h"

const char *openai_finish(enum lily_finish finish) {
    switch (finish) {
    case LILY_FINISH_TOOLS:
        return "tool_calls";
    case LILY_FINISH_LENGTH:
        return "length";
    default:
        return "stop";
    }
}

json_t *openai_usage(const lily_result *r) {
    return json_pack("{s:i, s:i, s:i, s:{s:i}, s:{s:i}}", "prompt_tokens", (int)r->prompt_tokens,
                     "completion_tokens", (int)r->output_tokens, "total_tokens",
                     (int)(r->prompt_tokens + r->output_tokens), "prompt_tokens_details",
                     "cached_tokens", (int)r->cached_tokens, "completion_tokens_details",
                     "reasoning_tokens", (int)r->reasoning_tokens);
}

/* ---- chunks ---------------------------------------------------------------------------------- */

json_t *openai_delta_role(void) {
    return json_pack("{s:s, s:s}", "role", "assistant", "content", "");
}

json_t *openai_delta_text(const char *field, const char *text, size_t n) {
    return json_pack("{s:o}", field, jsafe_string(text, n));
}

json_t *openai_delta_call(int index, const char *id, const char *name, size_t n) {
    return json_pack("{s:[{s:i, s:s, s:s, s:{s:o, s:s}}]}", "tool_calls", "index", index, "id", id,
                     "type", "function", "function", "name", jsafe_string(name, n), "arguments",
                     "");
}

json_t *openai_delta_args(int index, const char *text, size_t n) {
    return json_pack("{s:[{s:i, s:{s:o}}]}", "tool_calls", "index", index, "function", "arguments",
                     jsafe_string(text, n));
}

static json_t *chunk_with(const struct reply_head *head, json_t *choices, json_t *usage) {
    json_t *chunk =
        json_pack("{s:s, s:s, s:I, s:s, s:s, s:o}", "id", head->id, "object",
                  "chat.completion.chunk", "created", (json_int_t)head->created, "model",
                  head->model, "system_fingerprint", head->fingerprint, "choices", choices);
    if (chunk && head->include_usage) {
        json_object_set_new(chunk, "usage", usage ? usage : json_null());
    } else {
        json_decref(usage);
    }
    return chunk;
}

json_t *openai_chunk(const struct reply_head *head, json_t *delta, const char *finish) {
    json_t *choices = json_pack("[{s:i, s:o, s:n, s:s?}]", "index", 0, "delta", delta, "logprobs",
                                "finish_reason", finish);
    return choices ? chunk_with(head, choices, NULL) : NULL;
}

json_t *openai_usage_chunk(const struct reply_head *head, const lily_result *result) {
    return chunk_with(head, json_array(), openai_usage(result));
}

/* ---- a whole reply --------------------------------------------------------------------------- */

json_t *openai_call(const char *id, const char *name, const char *args, size_t n_args) {
    return json_pack("{s:s, s:s, s:{s:s, s:o}}", "id", id, "type", "function", "function", "name",
                     name, "arguments", jsafe_string(args, n_args));
}

json_t *openai_message(json_t *content, json_t *reasoning, json_t *calls) {
    if (calls && content && !json_string_length(content)) {
        json_decref(content);
        content = json_null();
    }
    json_t *message =
        json_pack("{s:s, s:o, s:n}", "role", "assistant", "content", content, "refusal");
    if (!message) {
        json_decref(reasoning);
        json_decref(calls);
        return NULL;
    }
    if (reasoning) json_object_set_new(message, "reasoning_content", reasoning);
    if (calls) json_object_set_new(message, "tool_calls", calls);
    return message;
}

json_t *openai_completion(const struct reply_head *head, json_t *message, const char *finish,
                          const lily_result *result) {
    return json_pack("{s:s, s:s, s:I, s:s, s:s, s:[{s:i, s:o, s:n, s:s}], s:o}", "id", head->id,
                     "object", "chat.completion", "created", (json_int_t)head->created, "model",
                     head->model, "system_fingerprint", head->fingerprint, "choices", "index", 0,
                     "message", message, "logprobs", "finish_reason", finish, "usage",
                     openai_usage(result));
}
