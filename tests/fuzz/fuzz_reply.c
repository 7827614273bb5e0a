/* The input is options, a stop string and a reply, whose bytes 1 to 6 are control tokens. Fed byte
 * by byte and in longer tokens it must give the same events, in order, as UTF-8, with arguments
 * that are one JSON object per call. */
#include <stdint.h>
#include <stdio.h>

#include "../text/tiny_tokenizer.h"
#include "text/json_text.h"
#include "text/reply.h"
#include "text/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "%s\n", what);
    abort();
}

struct seen {
    struct buf text; /* every event's text, with a mark wherever the kind changes */
    struct buf args;
    int last; /* kind + 1 */
    int calls, ended;
    bool in_call;
};

static int on_event(void *arg, const struct reply_event *e) {
    struct seen *s = arg;
    require(utf8_invalid_at(e->text, e->n) == e->n, "an event that is not UTF-8");
    bool of_call = e->kind == REPLY_TOOL_ARGS || e->kind == REPLY_TOOL_END;
    require(of_call == s->in_call, "events of calls and of text are mixed");
    if (s->last != (int)e->kind + 1 || e->kind == REPLY_TOOL_BEGIN)
        buf_printf(&s->text, "|%d:", (int)e->kind);
    buf_append(&s->text, e->text, e->n);
    s->last = (int)e->kind + 1;
    if (e->kind == REPLY_TOOL_BEGIN) {
        require(e->call == s->calls, "the index of a call");
        s->calls++;
        s->in_call = true;
        buf_clear(&s->args);
    }
    if (e->kind == REPLY_TOOL_ARGS) buf_append(&s->args, e->text, e->n);
    if (e->kind == REPLY_TOOL_END) {
        json_t *v = NULL;
        lily_err err;
        require(json_text_load("arguments", s->args.data, s->args.len, &v, &err) == 0, err.msg);
        require(json_is_object(v), "arguments that are no object");
        json_decref(v);
        s->ended++;
        s->in_call = false;
    }
    return 0;
}

/* Token 256 + i is the i-th of these; the second feeding uses them wherever they fit. */
static const char *const LONGER[] = {
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    "\n</parameter>\n",
    "\n<function=f>",
    "\xf0\x9f",
    "\x98\x80",
    "</par",
    "ameter>\n</func",
    "f>\n<parameter",
    "s>\ntext\n</pa",
    "\n</parameter>\n</fun",
    "<tool",
    "STO",
};
enum { N_LONGER = sizeof LONGER / sizeof *LONGER };

static const char TOOLS[] =
    "[{\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{\"s\":{\"type\":\"string\"},"
    "\"i\":{\"type\":\"integer\"},\"n\":{\"type\":[\"string\",\"null\"]},\"o\":{\"type\":"
    "\"object\"},"
    "\"a\":{},\"l\":{\"anyOf\":[{\"type\":\"array\"},{\"type\":\"boolean\"}]}}}}}]";

static void feed(const struct reply_options *options, const uint8_t *text, size_t n, bool longer,
                 struct seen *seen) {
    struct reply *r;
    lily_err err;
    bool stopped = false;
    require(reply_new(options, on_event, seen, &r, &err) == 0, "reply_new");
    for (size_t i = 0; i < n && !stopped;) {
        int32_t id = text[i];
        size_t len = 1;
        if (id >= 1 && id <= TINY_CONTROLS) id = TINY_FIRST_CONTROL + id - 1;
        for (size_t k = 0; longer && k < N_LONGER; k++) {
            size_t m = strlen(LONGER[k]);
            if (m > len && m <= n - i && memcmp(text + i, LONGER[k], m) == 0) {
                id = 256 + (int32_t)k;
                len = m;
            }
        }
        require(reply_push(r, id, &stopped, &err) == 0, "reply_push");
        i += len;
    }
    require(reply_finish(r, &err) == 0, "reply_finish");
    require(!seen->in_call && reply_tool_calls(r) == seen->ended, "calls that are not ended");
    reply_free(r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct tokenizer *t;
    static json_t *tools;
    if (!t) {
        size_t len[N_LONGER];
        lily_err err;
        for (size_t i = 0; i < N_LONGER; i++) len[i] = strlen(LONGER[i]);
        t = tiny_load(tiny_json(LONGER, len, N_LONGER, NULL), &err);
        tools = json_loads(TOOLS, 0, NULL);
        require(t && tools, "fixture");
    }
    if (size < 2) return 0;
    char stop[8] = {0};
    size_t stop_len = data[0] >> 5;
    if (size < 2 + stop_len) return 0;
    memcpy(stop, data + 1, stop_len);
    bool usable = utf8_invalid_at(stop, strlen(stop)) == strlen(stop);
    const char *const stops[] = {"STOP", usable ? stop : ""};
    struct reply_options options = {.tokenizer = t,
                                    .in_think = data[0] & 1,
                                    .tools = data[0] & 2 ? tools : NULL,
                                    .no_calls = (data[0] & 8) != 0,
                                    .stops = stops,
                                    .n_stops = data[0] & 4 ? 2 : 0};
    struct seen bytes = {0}, pieces = {0};
    feed(&options, data + 1 + stop_len, size - 1 - stop_len, false, &bytes);
    feed(&options, data + 1 + stop_len, size - 1 - stop_len, true, &pieces);
    require(bytes.text.len == pieces.text.len &&
                (!bytes.text.len || !memcmp(bytes.text.data, pieces.text.data, bytes.text.len)),
            "the events depend on how the bytes were cut into tokens");
    buf_free(&bytes.text);
    buf_free(&bytes.args);
    buf_free(&pieces.text);
    buf_free(&pieces.args);
    return 0;
}
