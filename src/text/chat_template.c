/* Follows chat_template.jinja statement by statement, in its order, so that the first thing the
 * template would refuse is the one that is refused here. Comments name the template's variables. */
#include "text/chat_template.h"

#include <stdlib.h>
#include <string.h>

#include "text/json_text.h"
#include "text/utf8.h"

const char chat_template_sha256[] =
    "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259";

static const char tools_header[] =
    "# Tools\n\nYou have access to the following functions:\n\n<tools>";
static const char tools_footer[] =
    "\n</tools>"
    "\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n"
    "</parameter>\n<parameter=example_parameter_2>\nThis is the value for the second parameter\n"
    "that can span\nmultiple lines\n</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\n"
    "Reminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block "
    "must be nested within <tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the "
    "function call, but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current "
    "knowledge and do not tell the user about function calls\n"
    "</IMPORTANT>";

/* A range of text that somebody else owns. */
struct slice {
    const char *text;
    size_t n;
};

struct renderer {
    const json_t *messages;
    const struct chat_options *options;
    struct chat_text *out;
    struct buf content; /* of the message in hand */
    bool failed;        /* out of memory: appends do nothing from then on */
    lily_err *err;
};

void chat_text_free(struct chat_text *t) {
    buf_free(&t->text);
    free(t->spans);
    *t = (struct chat_text){0};
}

/* reason: the template's words where it has any. */
static int refuse(struct renderer *r, size_t index, const char *reason) {
    return ERR(r->err, LILY_EINVAL, "messages[%zu]: %s", index, reason);
}

/* Appends bytes that come from a message or a tool. */
static void put(struct renderer *r, struct slice s) {
    if (!r->failed && !buf_append(&r->out->text, s.text, s.n)) r->failed = true;
}

/* Appends the template's own bytes: the only ones in which control tokens count. */
static void own(struct renderer *r, const char *text) {
    struct chat_text *out = r->out;
    size_t begin = out->text.len;
    put(r, (struct slice){text, strlen(text)});
    if (r->failed) return;
    if (out->n_spans > 0 && out->spans[out->n_spans - 1].end == begin) {
        out->spans[out->n_spans - 1].end = out->text.len;
        return;
    }
    if (out->n_spans == out->cap_spans) {
        size_t cap = out->cap_spans ? 2 * out->cap_spans : 16;
        struct text_span *grown = realloc(out->spans, cap * sizeof *grown);
        if (!grown) {
            r->failed = true;
            return;
        }
        out->spans = grown;
        out->cap_spans = cap;
    }
    out->spans[out->n_spans++] = (struct text_span){begin, out->text.len};
}

static void put_json(struct renderer *r, const json_t *v) {
    if (!r->failed && !json_text_append(&r->out->text, v)) r->failed = true;
}

/* ---- slices, as Python's str methods cut them ------------------------------------------------ */

static struct slice strip(struct slice s) {
    size_t begin = 0, end = s.n;
    utf8_strip(s.text, &begin, &end);
    return (struct slice){s.text + begin, end - begin};
}

static struct slice strip_left_newlines(struct slice s) {
    while (s.n && *s.text == '\n') s = (struct slice){s.text + 1, s.n - 1};
    return s;
}

static struct slice strip_right_newlines(struct slice s) {
    while (s.n && s.text[s.n - 1] == '\n') s.n--;
    return s;
}

static bool starts_with(struct slice s, const char *what) {
    return s.n >= strlen(what) && memcmp(s.text, what, strlen(what)) == 0;
}

static bool ends_with(struct slice s, const char *what) {
    return s.n >= strlen(what) && memcmp(s.text + s.n - strlen(what), what, strlen(what)) == 0;
}

/* Offset of the first occurrence, or s.n. */
static size_t find_first(struct slice s, const char *what) {
    const char *at = s.n ? memmem(s.text, s.n, what, strlen(what)) : NULL;
    return at ? (size_t)(at - s.text) : s.n;
}

/* What follows the last occurrence; all of s without one. */
static struct slice after_last(struct slice s, const char *what) {
    size_t at;
    while ((at = find_first(s, what)) < s.n) {
        at += strlen(what);
        s = (struct slice){s.text + at, s.n - at};
    }
    return s;
}

/* ---- messages -------------------------------------------------------------------------------- */

static const json_t *message_at(const struct renderer *r, size_t index) {
    return json_array_get(r->messages, index);
}

static bool has_role(const json_t *message, const char *role) {
    const char *found = json_string_value(json_object_get(message, "role"));
    return found && strcmp(found, role) == 0;
}

/* The template's test for one part of a list; NULL when it is text. */
static const char *part_refusal(const json_t *part, bool system) {
    const char *type = json_string_value(json_object_get(part, "type"));
    if (!json_is_object(part)) return "Unexpected item type in content.";
    if (json_object_get(part, "image") || json_object_get(part, "image_url") ||
        (type && strcmp(type, "image") == 0)) {
        return system ? "System message cannot contain images."
                      : "found an image, expected text; this program reads text only";
    }
    if (json_object_get(part, "video") || (type && strcmp(type, "video") == 0)) {
        return system ? "System message cannot contain videos."
                      : "found a video, expected text; this program reads text only";
    }
    const json_t *text = json_object_get(part, "text");
    if (!text) return "Unexpected item type in content.";
    return json_is_string(text) ? NULL : "found a text part whose text is no string";
}

/* render_content(...)|trim of a message: *out lies in r->content until the next call. */
static int render_content(struct renderer *r, size_t index, bool system, struct slice *out) {
    const json_t *content = json_object_get(message_at(r, index), "content");
    buf_clear(&r->content);
    bool ok = buf_reserve(&r->content, 0);
    if (json_is_string(content)) {
        ok = ok && buf_append(&r->content, json_string_value(content), json_string_length(content));
    } else if (json_is_array(content)) {
        size_t i;
        json_t *part;
        json_array_foreach(content, i, part) {
            const char *reason = part_refusal(part, system);
            if (reason) return refuse(r, index, reason);
            const json_t *text = json_object_get(part, "text");
            ok = ok && buf_append(&r->content, json_string_value(text), json_string_length(text));
        }
    } else if (content && !json_is_null(content)) {
        return refuse(r, index, "Unexpected content type.");
    }
    if (!ok) return ERR_NOMEM(r->err, "chat template");
    *out = strip((struct slice){r->content.data, r->content.len});
    return 0;
}

/* Everything before the first turn: tools and the system message. */
static int render_system(struct renderer *r, const json_t *tools) {
    bool system = has_role(message_at(r, 0), "system");
    struct slice content = {"", 0};
    if (json_array_size(tools) > 0) {
        own(r, "<|im_start|>system\n");
        own(r, tools_header);
        size_t i;
        json_t *tool;
        json_array_foreach(tools, i, tool) {
            own(r, "\n");
            put_json(r, tool);
        }
        own(r, tools_footer);
        int rc = system ? render_content(r, 0, true, &content) : 0;
        if (rc) return rc;
        if (content.n) own(r, "\n\n");
    } else if (system) {
        int rc = render_content(r, 0, true, &content);
        if (rc) return rc;
        own(r, "<|im_start|>system\n");
    } else {
        return 0;
    }
    put(r, content);
    own(r, "<|im_end|>\n");
    return 0;
}

/* last_query_index: the last message of a user that is not a tool's response in disguise. */
static int find_last_query(struct renderer *r, size_t *last_query) {
    for (size_t i = json_array_size(r->messages); i-- > 0;) {
        if (!has_role(message_at(r, i), "user")) continue;
        struct slice content;
        int rc = render_content(r, i, false, &content);
        if (rc) return rc;
        if (!(starts_with(content, "<tool_response>") && ends_with(content, "</tool_response>"))) {
            *last_query = i;
            return 0;
        }
    }
    return ERR(r->err, LILY_EINVAL, "messages: No user query found in messages.");
}

/* One call. lead: what separates it from the text or call before. An argument that is a string is
 * written as it is, everything else as JSON; calls may be wrapped in "function" or not. */
static int render_tool_call(struct renderer *r, size_t index, const json_t *call,
                            const char *lead) {
    const json_t *function = json_object_get(call, "function");
    if (function) call = function;
    const json_t *name = json_object_get(call, "name");
    const json_t *arguments = json_object_get(call, "arguments");
    if (!json_is_string(name)) return refuse(r, index, "found a tool call without a name");
    own(r, lead);
    own(r, "<tool_call>\n<function=");
    put(r, (struct slice){json_string_value(name), json_string_length(name)});
    own(r, ">\n");
    if (arguments && !json_is_object(arguments)) {
        return refuse(r, index, "Can only get item pairs from a mapping.");
    }
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)arguments, key, value) {
        own(r, "<parameter=");
        put(r, (struct slice){key, strlen(key)});
        own(r, ">\n");
        if (json_is_string(value))
            put(r, (struct slice){json_string_value(value), json_string_length(value)});
        else
            put_json(r, value);
        own(r, "\n</parameter>\n");
    }
    own(r, "</function>\n</tool_call>");
    return 0;
}

/* A turn of the assistant. Its reasoning is given on its own or at the beginning of the content,
 * and is shown only after the last query, or everywhere on request. */
static int render_assistant(struct renderer *r, size_t index, struct slice content,
                            bool after_query) {
    const json_t *message = message_at(r, index);
    const json_t *given = json_object_get(message, "reasoning_content");
    const json_t *calls = json_object_get(message, "tool_calls");
    struct slice reasoning = {"", 0};
    size_t close = find_first(content, "</think>");
    if (json_is_string(given)) {
        reasoning = (struct slice){json_string_value(given), json_string_length(given)};
    } else if (close < content.n) {
        reasoning = strip_right_newlines((struct slice){content.text, close});
        reasoning = strip_left_newlines(after_last(reasoning, "<think>"));
        content = strip_left_newlines(after_last(content, "</think>"));
    }
    own(r, "<|im_start|>assistant\n");
    if (r->options->preserve_thinking || after_query) {
        own(r, "<think>\n");
        put(r, strip(reasoning));
        own(r, "\n</think>\n\n");
    }
    put(r, content);
    if (calls && !json_is_null(calls) && !json_is_array(calls)) {
        return refuse(r, index, "found tool_calls that are no array");
    }
    size_t i;
    json_t *call;
    json_array_foreach(calls, i, call) {
        const char *lead = i ? "\n" : strip(content).n ? "\n\n" : "";
        int rc = render_tool_call(r, index, call, lead);
        if (rc) return rc;
    }
    bool open = r->options->continue_final && index + 1 == json_array_size(r->messages);
    if (!open) own(r, "<|im_end|>\n");
    return 0;
}

/* Consecutive results share one turn of the user. */
static void render_tool_result(struct renderer *r, size_t index, struct slice content) {
    if (index > 0 && !has_role(message_at(r, index - 1), "tool")) own(r, "<|im_start|>user");
    own(r, "\n<tool_response>\n");
    put(r, content);
    own(r, "\n</tool_response>");
    if (!has_role(message_at(r, index + 1), "tool")) own(r, "<|im_end|>\n");
}

/* One pass of the template's main loop. The content is rendered before the role is looked at, so a
 * fault in it is reported first. */
static int render_message(struct renderer *r, size_t index, size_t last_query) {
    const json_t *message = message_at(r, index);
    struct slice content;
    int rc = render_content(r, index, false, &content);
    if (rc) return rc;
    if (has_role(message, "system")) {
        return index ? refuse(r, index, "System message must be at the beginning.") : 0;
    }
    if (has_role(message, "user")) {
        own(r, "<|im_start|>user\n");
        put(r, content);
        own(r, "<|im_end|>\n");
        return 0;
    }
    if (has_role(message, "assistant")) {
        return render_assistant(r, index, content, index > last_query);
    }
    if (has_role(message, "tool")) {
        render_tool_result(r, index, content);
        return 0;
    }
    return refuse(r, index, "Unexpected message role.");
}

/* The template from top to bottom. */
static int render(struct renderer *r, const json_t *tools) {
    size_t n = json_array_size(r->messages), last_query = 0;
    if (n == 0) return ERR(r->err, LILY_EINVAL, "messages: No messages provided.");
    if (tools && !json_is_null(tools) && !json_is_array(tools)) {
        return ERR(r->err, LILY_EINVAL, "tools: found no array, expected an array of tools");
    }
    if (r->options->continue_final && !chat_ends_open(r->messages)) {
        return refuse(r, n - 1, "found no assistant's text, expected one to continue");
    }
    int rc = render_system(r, tools);
    if (!rc) rc = find_last_query(r, &last_query);
    for (size_t i = 0; !rc && i < n; i++) rc = render_message(r, i, last_query);
    if (rc) return rc;
    if (r->options->add_generation_prompt && !r->options->continue_final) {
        own(r, "<|im_start|>assistant\n");
        own(r, r->options->enable_thinking ? "<think>\n" : "<think>\n\n</think>\n\n");
    }
    return r->failed ? ERR_NOMEM(r->err, "chat template") : 0;
}

int chat_render(const json_t *messages, const json_t *tools, const struct chat_options *options,
                struct chat_text *out, lily_err *err) {
    *out = (struct chat_text){0};
    struct renderer r = {.messages = messages, .options = options, .out = out, .err = err};
    int rc = render(&r, tools);
    if (rc) chat_text_free(out);
    buf_free(&r.content);
    return rc;
}

bool chat_ends_open(const json_t *messages) {
    size_t n = json_array_size(messages);
    const json_t *last = n ? json_array_get(messages, n - 1) : NULL;
    return has_role(last, "assistant") && json_array_size(json_object_get(last, "tool_calls")) == 0;
}

bool chat_ends_in_think(const struct chat_options *options) {
    return options->add_generation_prompt && options->enable_thinking && !options->continue_final;
}
