/* The text layer on its own, for tests: reads one JSON document a line, writes one a line.
 *   {"op":"encode", "text":T, "control":B}            -> {"ids":[...]}
 *   {"op":"encode_file", "file":PATH, "control":B}    -> {"ids":[...], "seconds":S} of processor
 * time
 *   {"op":"bytes", "ids":[...]}                       -> {"hex":[...]} (null: no such token)
 *   {"op":"render", "messages":M, "tools":T, "options":{...}, "mend":B} -> {"text":T, "ids":[...]}
 *   {"op":"reply", "ids":[...], "in_think":B, "tools":T} -> {"message":M} to be sent back
 * A failure gives {"error":MESSAGE}. The argument is a tokenizer.json; without one only the text of
 * "render" is given. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../cpu_clock.h"
#include "base/file.h"
#include "text/chat_template.h"
#include "text/json_text.h"
#include "text/reply.h"

static struct tokenizer *tokenizer;

static json_t *id_array(const struct id_list *ids) {
    json_t *out = json_array();
    for (size_t i = 0; i < ids->len; i++) json_array_append_new(out, json_integer(ids->data[i]));
    return out;
}

static int encode(const json_t *in, const char *text, size_t n, json_t *out, lily_err *err) {
    struct id_list ids = {0};
    bool control = json_is_true(json_object_get(in, "control"));
    double start = cpu_seconds();
    int rc = tokenizer_encode_all(tokenizer, text, n, control, &ids, err);
    json_object_set_new(out, "seconds", json_real(cpu_seconds() - start));
    if (!rc) json_object_set_new(out, "ids", id_array(&ids));
    id_list_free(&ids);
    return rc;
}

static int encode_file(const json_t *in, json_t *out, lily_err *err) {
    char *text;
    size_t n;
    int rc =
        file_read(json_string_value(json_object_get(in, "file")), (size_t)1 << 30, &text, &n, err);
    if (rc) return rc;
    rc = encode(in, text, n, out, err);
    free(text);
    return rc;
}

static void bytes(const json_t *in, json_t *out) {
    json_t *list = json_array(), *id;
    size_t i;
    json_array_foreach(json_object_get(in, "ids"), i, id) {
        size_t n;
        const char *b = tokenizer_bytes(tokenizer, (int32_t)json_integer_value(id), &n);
        struct buf hex = {0};
        buf_puts(&hex, "");
        for (size_t k = 0; b && k < n; k++) buf_printf(&hex, "%02x", (unsigned char)b[k]);
        json_array_append_new(list, b ? json_string(hex.data) : json_null());
        buf_free(&hex);
    }
    json_object_set_new(out, "hex", list);
}

static int render(const json_t *in, json_t *out, lily_err *err) {
    const json_t *messages = json_object_get(in, "messages");
    const json_t *flags = json_object_get(in, "options");
    struct chat_options options = {
        .enable_thinking = !json_is_false(json_object_get(flags, "enable_thinking")),
        .preserve_thinking = json_is_true(json_object_get(flags, "preserve_thinking")),
        .add_generation_prompt = json_is_true(json_object_get(flags, "add_generation_prompt")),
    };
    json_t *mended = NULL;
    if (json_is_true(json_object_get(in, "mend"))) {
        int rc = chat_mend(messages, &mended, err);
        if (rc) return rc;
        messages = mended;
        options.continue_final = chat_ends_open(messages);
    }
    struct chat_text text;
    struct id_list ids = {0};
    int rc = chat_render(messages, json_object_get(in, "tools"), &options, &text, err);
    if (!rc && tokenizer) {
        rc = tokenizer_encode(tokenizer, text.text.data, text.text.len, text.spans, text.n_spans,
                              &ids, err);
        json_object_set_new(out, "ids", id_array(&ids));
    }
    if (!rc) json_object_set_new(out, "text", json_stringn(text.text.data, text.text.len));
    if (!rc) chat_text_free(&text);
    id_list_free(&ids);
    json_decref(mended);
    return rc;
}

/* A reply's events as the message of the assistant that a client would send back. */
struct message {
    struct buf reasoning, content, arguments;
    json_t *calls;
};

static int on_reply(void *arg, const struct reply_event *e) {
    struct message *m = arg;
    if (e->kind == REPLY_REASONING) buf_append(&m->reasoning, e->text, e->n);
    if (e->kind == REPLY_CONTENT) buf_append(&m->content, e->text, e->n);
    if (e->kind == REPLY_TOOL_ARGS) buf_append(&m->arguments, e->text, e->n);
    if (e->kind == REPLY_TOOL_BEGIN) {
        buf_clear(&m->arguments);
        json_array_append_new(
            m->calls, json_pack("{s:s, s:{s:s}}", "type", "function", "function", "name", e->text));
    }
    if (e->kind == REPLY_TOOL_END) {
        json_t *call = json_array_get(m->calls, (size_t)e->call);
        json_object_set_new(json_object_get(call, "function"), "arguments",
                            json_stringn(m->arguments.data, m->arguments.len));
    }
    return 0;
}

static int split_reply(const json_t *in, json_t *out, lily_err *err) {
    struct message m = {.calls = json_array()};
    struct reply_options options = {.tokenizer = tokenizer,
                                    .in_think = json_is_true(json_object_get(in, "in_think")),
                                    .tools = json_object_get(in, "tools")};
    struct reply *reply;
    int rc = reply_new(&options, on_reply, &m, &reply, err);
    size_t i;
    json_t *id;
    bool stopped;
    if (rc) return rc;
    json_array_foreach(json_object_get(in, "ids"), i, id) {
        if (!rc) rc = reply_push(reply, (int32_t)json_integer_value(id), &stopped, err);
    }
    if (!rc) rc = reply_finish(reply, err);
    reply_free(reply);
    json_t *message = json_pack(
        "{s:s, s:o, s:o}", "role", "assistant", "content",
        json_stringn(m.content.len ? m.content.data : "", m.content.len), "reasoning_content",
        json_stringn(m.reasoning.len ? m.reasoning.data : "", m.reasoning.len));
    if (json_array_size(m.calls) > 0) json_object_set(message, "tool_calls", m.calls);
    json_object_set_new(out, "message", message);
    json_decref(m.calls);
    buf_free(&m.reasoning);
    buf_free(&m.content);
    buf_free(&m.arguments);
    return rc;
}

static void answer(const char *line, size_t n) {
    lily_err err = {0};
    json_t *in, *out = json_object();
    int rc = json_text_load("request", line, n, &in, &err);
    const char *op = rc ? "" : json_string_value(json_object_get(in, "op"));
    const json_t *text = rc ? NULL : json_object_get(in, "text");
    if (!strcmp(op, "encode"))
        rc = encode(in, json_string_value(text), json_string_length(text), out, &err);
    else if (!strcmp(op, "encode_file"))
        rc = encode_file(in, out, &err);
    else if (!strcmp(op, "bytes"))
        bytes(in, out);
    else if (!strcmp(op, "render"))
        rc = render(in, out, &err);
    else if (!strcmp(op, "reply"))
        rc = split_reply(in, out, &err);
    if (rc) json_object_set_new(out, "error", json_string(err.msg));
    json_dumpf(out, stdout, JSON_COMPACT);
    putchar('\n');
    fflush(stdout);
    json_decref(out);
    json_decref(in);
}

int main(int argc, char **argv) {
    lily_err err;
    char *json, *line = NULL;
    size_t size, cap = 0;
    if (argc > 1) {
        int rc = file_read(argv[1], (size_t)1 << 30, &json, &size, &err);
        if (!rc) {
            rc = tokenizer_load(json, size, &tokenizer, &err);
            free(json);
        }
        if (rc) {
            fprintf(stderr, "%s\n", err.msg);
            return 1;
        }
    }
    for (ssize_t n; (n = getline(&line, &cap, stdin)) >= 0;) answer(line, (size_t)n);
    free(line);
    tokenizer_free(tokenizer);
    return 0;
}
