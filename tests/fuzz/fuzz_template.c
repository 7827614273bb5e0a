/* The input is {"messages": ..., "tools": ...} or a list of messages, preceded by a byte of
 * options. It is rendered as it is and mended; what mending accepts must render unless there is no
 * user. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text/chat_template.h"
#include "text/json_text.h"
#include "text/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "%s\n", what);
    abort();
}

static int render(const json_t *messages, const json_t *tools, const struct chat_options *options,
                  lily_err *err) {
    struct chat_text text;
    int rc = chat_render(messages, tools, options, &text, err);
    if (rc) return rc;
    size_t at = 0;
    require(utf8_invalid_at(text.text.data, text.text.len) == text.text.len, "not UTF-8");
    for (size_t i = 0; i < text.n_spans; i++) {
        require(text.spans[i].begin >= at && text.spans[i].end > text.spans[i].begin, "spans");
        at = text.spans[i].end;
    }
    require(at <= text.text.len, "a span beyond the text");
    chat_text_free(&text);
    return 0;
}

static void check_json(const json_t *v) {
    struct buf out = {0};
    json_t *again = NULL;
    lily_err err;
    require(json_text_append(&out, v), "out of memory");
    require(json_text_load("again", out.data, out.len, &again, &err) == 0, err.msg);
    require(json_equal((json_t *)v, again), "json.dumps does not read back as the same");
    json_decref(again);
    buf_free(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    json_t *in = NULL, *mended = NULL;
    lily_err err;
    if (size == 0) return 0;
    struct chat_options options = {.enable_thinking = data[0] & 1,
                                   .preserve_thinking = data[0] & 2,
                                   .add_generation_prompt = data[0] & 4};
    if (json_text_load("input", (const char *)data + 1, size - 1, &in, &err)) return 0;
    check_json(in);
    const json_t *messages = json_object_get(in, "messages");
    const json_t *tools = json_object_get(in, "tools");
    if (!messages) messages = in;
    render(messages, tools, &options, &err);
    if (chat_mend(messages, &mended, &err) == 0) {
        options.continue_final = chat_ends_open(mended);
        if (render(mended, NULL, &options, &err)) {
            require(strstr(err.msg, "No user query found") || strstr(err.msg, "No messages"),
                    err.msg);
        }
        json_decref(mended);
    }
    json_decref(in);
    return 0;
}
