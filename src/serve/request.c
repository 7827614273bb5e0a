#include "serve/request.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "serve/fields.h"
#include "serve/json_safe.h"
#include "serve/messages.h"
#include "text/json_text.h"

static int no_memory(struct api_error *err) {
    return api_error_set(err, 503, "out_of_memory", NULL, "request: out of memory");
}

/* ---- the body as JSON ------------------------------------------------------------------------ */

static int check_scan(const char *body, size_t n, struct api_error *err) {
    struct jsafe_report report;
    jsafe_scan(body, n, &report);
    const char *at = report.path[0] ? report.path : "body";
    switch (report.fault) {
    case JSAFE_DEPTH:
        return api_error_set(err, 400, "invalid_json", report.path,
                             "%s: nested deeper than %d levels at byte %zu", at, JSAFE_MAX_DEPTH,
                             report.offset);
    case JSAFE_VALUES:
        return api_error_set(err, 400, "invalid_json", report.path,
                             "%s: more than %d values in one request", at, JSAFE_MAX_VALUES);
    case JSAFE_SURROGATE:
        return api_error_set(err, 400, "invalid_unicode", report.path,
                             "%s: found a lone surrogate escape at byte %zu, expected a pair or a "
                             "code point",
                             at, report.offset);
    default:
        return 0;
    }
}

static json_t *load_body(const char *body, size_t n, struct api_error *err) {
    lily_err why = {0};
    json_t *root = NULL;
    if (check_scan(body, n, err)) return NULL;
    int rc = json_text_load("body", body, n, &root, &why);
    if (rc) {
        rc == LILY_ENOMEM ? no_memory(err)
                          : api_error_set(err, 400, "invalid_json", NULL, "%s", why.msg);
        return NULL;
    }
    if (json_is_object(root)) return root;
    api_error_set(err, 400, "invalid_json", NULL, "body: found %s, expected a JSON object",
                  field_type(root));
    json_decref(root);
    return NULL;
}

/* ---- fields that would change the meaning and are not supported ------------------------------ */

/* neutral: the value, as JSON, that asks for nothing; NULL: any value asks for something. */
static const struct refused {
    const char *name, *neutral;
} refused[] = {
    {"n", "1"},
    {"logprobs", "false"},
    {"top_logprobs", "0"},
    {"response_format", "{\"type\": \"text\"}"},
    {"modalities", "[\"text\"]"},
    {"audio", NULL},
    {"functions", "[]"},
    {"function_call", "\"none\""},
    {"web_search_options", NULL},
    {"best_of", "1"},
    {"use_beam_search", "false"},
    {"echo", "false"},
    {"prompt_logprobs", NULL},
    {"min_tokens", "0"},
    {"stop_token_ids", "[]"},
    {"bad_words", "[]"},
    {"guided_json", NULL},
    {"guided_regex", NULL},
    {"guided_choice", NULL},
    {"guided_grammar", NULL},
    {"structured_outputs", NULL},
    {"json_schema", NULL},
    {"grammar", "\"\""},
    {"thinking_budget", NULL},
    {"thinking_token_budget", NULL},
    {"continue_final_message", "false"},
    {"add_generation_prompt", "true"},
};

static int check_refused(const json_t *root, struct api_error *err) {
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const struct refused *f = &refused[i];
        json_t *value = field_get(root, f->name);
        if (!value) continue;
        json_t *neutral = f->neutral ? json_loads(f->neutral, JSON_DECODE_ANY, NULL) : NULL;
        bool same = neutral && json_equal(value, neutral);
        json_decref(neutral);
        if (same) continue;
        return api_error_set(err, 400, "unsupported_parameter", f->name,
                             "%s: not supported by this server; leave it out%s%s", f->name,
                             f->neutral ? " or send " : "", f->neutral ? f->neutral : "");
    }
    return 0;
}

/* ---- groups of fields ------------------------------------------------------------------------ */

static const struct number_field {
    const char *name;
    size_t offset; /* of a float in lily_sampling */
    double lo, hi;
} numbers[] = {
    {"temperature", offsetof(lily_sampling, temperature), 0, 2},
    {"top_p", offsetof(lily_sampling, top_p), 0, 1},
    {"min_p", offsetof(lily_sampling, min_p), 0, 1},
    {"presence_penalty", offsetof(lily_sampling, presence_penalty), -2, 2},
    {"frequency_penalty", offsetof(lily_sampling, frequency_penalty), -2, 2},
    {"repetition_penalty", offsetof(lily_sampling, repetition_penalty), 0.01, 10},
};

static int parse_bias(const json_t *root, int32_t vocab, lily_sampling *s, struct api_error *err) {
    json_t *bias;
    if (field_object(root, "", "logit_bias", &bias, err)) return -1;
    size_t n = json_object_size(bias);
    if (!n) return 0;
    int32_t *ids = malloc(n * sizeof *ids);
    float *values = malloc(n * sizeof *values);
    s->bias_ids = ids;
    s->bias = values;
    if (!ids || !values) return no_memory(err);
    const char *key;
    json_t *value;
    json_object_foreach(bias, key, value) {
        char *end;
        long id = strtol(key, &end, 10);
        double x = 0;
        /* One spelling of an id, or two entries could mean one token. */
        bool plain = key[0] >= '0' && key[0] <= '9' && (key[0] != '0' || !key[1]);
        if (!plain || *end || id >= vocab) {
            return api_error_set(err, 400, "invalid_value", "logit_bias",
                                 "logit_bias: found token \"%.40s\", expected an id from 0 to %d",
                                 key, (int)vocab - 1);
        }
        if (json_is_null(value)) return field_wrong("logit_bias", key, value, "a number", err);
        if (field_number(bias, "logit_bias", key, -100, 100, &x, err)) return -1;
        ids[s->n_bias] = (int32_t)id;
        values[s->n_bias++] = (float)x;
    }
    return 0;
}

static int parse_sampling(const json_t *root, const struct request_limits *limits,
                          struct chat_request *r, struct api_error *err) {
    lily_sampling *s = &r->sampling;
    *s = r->thinking ? limits->thinking : limits->plain;
    s->bias_ids = NULL;
    s->bias = NULL;
    s->n_bias = 0;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        const struct number_field *f = &numbers[i];
        float *target = (float *)(void *)((char *)s + f->offset);
        double x = (double)*target;
        if (field_number(root, "", f->name, f->lo, f->hi, &x, err)) return -1;
        *target = (float)x;
    }
    int64_t top_k = s->top_k, seed = 0;
    if (field_integer(root, "", "top_k", -1, INT32_MAX, &top_k, err) ||
        field_integer(root, "", "seed", INT64_MIN, INT64_MAX, &seed, err))
        return -1;
    s->top_k = top_k < 0 ? 0 : (int32_t)top_k; /* -1 is another common spelling of "off" */
    s->random_seed = !field_get(root, "seed");
    s->seed = (uint64_t)seed;
    return parse_bias(root, limits->vocab, s, err);
}

static int add_stop(struct chat_request *r, const json_t *value, const char *path,
                    struct api_error *err) {
    if (!json_is_string(value)) return field_wrong(path, "", value, "a string", err);
    size_t n = json_string_length(value);
    if (!n) return 0; /* asks for nothing */
    if (n > REQUEST_MAX_STOP_BYTES || strlen(json_string_value(value)) != n) {
        return api_error_set(err, 400, "invalid_value", path,
                             "%s: found %zu bytes%s, expected at most %d bytes and no U+0000", path,
                             n, n > REQUEST_MAX_STOP_BYTES ? "" : " with U+0000 among them",
                             REQUEST_MAX_STOP_BYTES);
    }
    r->stops[r->n_stops] = strdup(json_string_value(value));
    if (!r->stops[r->n_stops]) return no_memory(err);
    r->n_stops++;
    return 0;
}

static int parse_stops(const json_t *root, struct chat_request *r, struct api_error *err) {
    const json_t *stop = field_get(root, "stop");
    if (!stop) return 0;
    size_t n = json_is_array(stop) ? json_array_size(stop) : 1;
    if (!json_is_array(stop) && !json_is_string(stop)) {
        return field_wrong("stop", "", stop, "a string or an array of strings", err);
    }
    if (n > REQUEST_MAX_STOPS) {
        return api_error_set(err, 400, "invalid_value", "stop",
                             "stop: found %zu strings, expected at most %d", n, REQUEST_MAX_STOPS);
    }
    r->stops = calloc(n + 1, sizeof *r->stops);
    if (!r->stops) return no_memory(err);
    if (json_is_string(stop)) return add_stop(r, stop, "stop", err);
    for (size_t i = 0; i < n; i++) {
        char path[32];
        snprintf(path, sizeof path, "stop[%zu]", i);
        if (add_stop(r, json_array_get(stop, i), path, err)) return -1;
    }
    return 0;
}

/* Whether the last message is an assistant's words, which are continued rather than answered. */
static bool continues(const json_t *root) {
    const json_t *messages = json_object_get(root, "messages");
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const char *role = json_string_value(json_object_get(last, "role"));
    return role && !strcmp(role, "assistant") && !field_get(last, "function_call") &&
           !json_array_size(json_object_get(last, "tool_calls"));
}

/* Thinking is on unless something turns it off; the template's own switch decides over
 * reasoning_effort. */
static int parse_thinking(const json_t *root, struct chat_request *r, struct api_error *err) {
    static const char *const efforts[] = {"none", "minimal", "low", "medium", "high", "xhigh"};
    const char *effort = "medium";
    if (field_string(root, "", "reasoning_effort", &effort, err)) return -1;
    bool known = false;
    for (size_t i = 0; i < sizeof efforts / sizeof *efforts; i++)
        known |= !strcmp(effort, efforts[i]);
    if (!known) {
        return api_error_set(err, 400, "invalid_value", "reasoning_effort",
                             "reasoning_effort: found \"%.40s\", expected none, minimal, low, "
                             "medium, high or xhigh",
                             effort);
    }
    r->thinking = strcmp(effort, "none") != 0;
    static const char kwargs_name[] = "chat_template_kwargs";
    json_t *kwargs;
    if (field_bool(root, "", "enable_thinking", &r->thinking, err) ||
        field_object(root, "", kwargs_name, &kwargs, err))
        return -1;
    if (field_bool(kwargs, kwargs_name, "enable_thinking", &r->thinking, err) ||
        field_bool(kwargs, kwargs_name, "preserve_thinking", &r->preserve_thinking, err))
        return -1;
    if (continues(root)) r->thinking = false; /* the think block lies before what is continued */
    return 0;
}

static int parse_limits(const json_t *root, struct chat_request *r, struct api_error *err) {
    static const char *const names[] = {"max_tokens", "max_completion_tokens"}; /* the later wins */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        int64_t n = -1; /* -1: no limit, as several local servers have it */
        if (!field_get(root, names[i])) continue;
        if (field_integer(root, "", names[i], -1, INT64_MAX, &n, err)) return -1;
        if (n == 0) {
            return api_error_set(err, 400, "invalid_value", names[i],
                                 "%s: found 0, expected at least 1", names[i]);
        }
        r->max_tokens = n < 0 ? 0 : n > INT32_MAX ? INT32_MAX : (int32_t)n;
    }
    return field_bool(root, "", "ignore_eos", &r->ignore_eos, err);
}

static int parse_stream(const json_t *root, struct chat_request *r, struct api_error *err) {
    json_t *options;
    if (field_bool(root, "", "stream", &r->stream, err) ||
        field_object(root, "", "stream_options", &options, err))
        return -1;
    if (!options) return 0;
    if (!r->stream) {
        return api_error_set(err, 400, "invalid_value", "stream_options",
                             "stream_options: found without stream, expected \"stream\": true "
                             "beside it");
    }
    return field_bool(options, "stream_options", "include_usage", &r->include_usage, err);
}

/* *offer: whether the model is shown the tools at all. */
static int parse_tool_choice(const json_t *root, bool *offer, struct api_error *err) {
    const json_t *choice = field_get(root, "tool_choice");
    bool parallel = true;
    *offer = true;
    if (field_bool(root, "", "parallel_tool_calls", &parallel, err)) return -1;
    if (!choice) return 0;
    if (!json_is_string(choice) && !json_is_object(choice)) {
        return field_wrong("tool_choice", "", choice, "a string or an object", err);
    }
    const char *name = json_is_string(choice) ? json_string_value(choice) : "an object";
    if (!strcmp(name, "none")) *offer = false;
    if (!strcmp(name, "none") || !strcmp(name, "auto")) return 0;
    return api_error_set(err, 400, "unsupported_value", "tool_choice",
                         "tool_choice: found %.40s, expected \"auto\" or \"none\"; forcing a call "
                         "is not supported",
                         name);
}

static int parse_conversation(const json_t *root, struct chat_request *r, struct api_error *err) {
    const json_t *messages = json_object_get(root, "messages");
    const json_t *tools = field_get(root, "tools");
    bool offer;
    if (messages_check(messages, err) || (tools && tools_check(tools, err)) ||
        parse_tool_choice(root, &offer, err))
        return -1;
    r->messages = json_dumps(messages, JSON_COMPACT);
    if (!r->messages) return no_memory(err);
    if (!offer || !json_array_size(tools)) return 0;
    r->tools = json_dumps(tools, JSON_COMPACT);
    return r->tools ? 0 : no_memory(err);
}

static int parse_root(const json_t *root, const struct request_limits *limits,
                      struct chat_request *r, struct api_error *err) {
    const char *text = NULL; /* one model is served: any name is answered by it */
    if (field_string(root, "", "model", &text, err) || field_string(root, "", "user", &text, err))
        return -1;
    return check_refused(root, err) || parse_conversation(root, r, err) ||
                   parse_thinking(root, r, err) || parse_sampling(root, limits, r, err) ||
                   parse_stops(root, r, err) || parse_limits(root, r, err) ||
                   parse_stream(root, r, err)
               ? -1
               : 0;
}

int request_parse(const char *body, size_t n, const struct request_limits *limits,
                  struct chat_request **out, struct api_error *err) {
    *out = NULL;
    json_t *root = load_body(body, n, err);
    if (!root) return -1;
    struct chat_request *r = calloc(1, sizeof *r);
    int rc = r ? parse_root(root, limits, r, err) : no_memory(err);
    json_decref(root);
    if (rc) {
        request_free(r);
        return -1;
    }
    *out = r;
    return 0;
}

void request_free(struct chat_request *r) {
    if (!r) return;
    free((void *)r->sampling.bias_ids);
    free((void *)r->sampling.bias);
    for (size_t i = 0; i < r->n_stops; i++) free(r->stops[i]);
    free(r->stops);
    free(r->messages);
    free(r->tools);
    free(r);
}
