/* What clients send that the template refuses or would render wrongly, put right. docs/clients.md
 * lists every rule with its reason; tests/unit/test_text_mend.c has a test for each. */
#include <string.h>

#include "text/chat_template.h"
#include "text/json_text.h"
#include "text/utf8.h"

/* Marks a system message that came after the beginning and is now a user's turn. */
static const char late_system_mark[] = "[System message]\n";

static int bad(lily_err *err, size_t index, const char *where, const char *found,
               const char *expected) {
    return ERR(err, LILY_EINVAL, "messages[%zu]%s: found %s, expected %s", index, where, found,
               expected);
}

static const char *role_of(const json_t *message) {
    return json_string_value(json_object_get(message, "role"));
}

static bool has_role(const json_t *message, const char *role) {
    return role_of(message) && strcmp(role_of(message), role) == 0;
}

/* Every role becomes one of the template's four. */
static int mend_role(json_t *message, size_t index, lily_err *err) {
    static const char *const known[] = {"system", "user", "assistant", "tool", NULL};
    const char *role = role_of(message);
    if (role && strcmp(role, "developer") == 0) role = "system";
    if (role && strcmp(role, "function") == 0) role = "tool"; /* before tool_calls existed */
    for (size_t i = 0; role && known[i]; i++) {
        if (strcmp(role, known[i]) != 0) continue;
        json_t *copy = json_string(known[i]);
        if (json_object_set_new(message, "role", copy)) return ERR_NOMEM(err, "messages");
        return 0;
    }
    return bad(err, index, ".role", role ? "an unknown role" : "no role",
               "system, developer, user, assistant or tool");
}

/* The text of one part of a content list, or NULL when it is none. */
static const json_t *part_text(const json_t *part) {
    static const char *const keys[] = {"text", "refusal", NULL};
    if (json_is_string(part)) return part;
    for (size_t i = 0; keys[i]; i++) {
        const json_t *text = json_object_get(part, keys[i]);
        if (json_is_string(text)) return text;
    }
    return NULL;
}

/* A list of text parts becomes one string. */
static int mend_content(json_t *message, size_t index, lily_err *err) {
    const json_t *content = json_object_get(message, "content");
    if (!content || json_is_null(content) || json_is_string(content)) return 0;
    if (!json_is_array(content)) {
        return bad(err, index, ".content", "another JSON type",
                   "a string, a list of parts or null");
    }
    struct buf joined = {0};
    bool ok = buf_reserve(&joined, 0);
    size_t i;
    json_t *part;
    json_array_foreach(content, i, part) {
        const json_t *text = part_text(part);
        if (!text) {
            const char *type = json_string_value(json_object_get(part, "type"));
            buf_free(&joined);
            return ERR(err, LILY_EINVAL,
                       "messages[%zu].content[%zu]: found a part of type %.40s, expected text; "
                       "this program reads text only",
                       index, i, type ? type : "(none)");
        }
        ok = ok && buf_append(&joined, json_string_value(text), json_string_length(text));
    }
    if (ok) {
        ok = json_object_set_new(message, "content", json_stringn(joined.data, joined.len)) == 0;
    }
    buf_free(&joined);
    return ok ? 0 : ERR_NOMEM(err, "messages");
}

/* `reasoning` is what some servers and clients call reasoning_content. */
static int mend_reasoning(json_t *message, lily_err *err) {
    json_t *other = json_object_get(message, "reasoning");
    if (json_is_string(json_object_get(message, "reasoning_content"))) return 0;
    if (!json_is_string(other)) return 0;
    return json_object_set(message, "reasoning_content", other) ? ERR_NOMEM(err, "messages") : 0;
}

/* The older function_call becomes the one entry of tool_calls. */
static int mend_function_call(json_t *message, lily_err *err) {
    json_t *call = json_object_get(message, "function_call");
    if (!json_is_object(call) || json_array_size(json_object_get(message, "tool_calls")) > 0) {
        return 0;
    }
    json_t *calls = json_pack("[{s:s, s:O}]", "type", "function", "function", call);
    return json_object_set_new(message, "tool_calls", calls) ? ERR_NOMEM(err, "messages") : 0;
}

/* OpenAI's API has arguments as a string of JSON; the template wants the object. */
static int mend_arguments(json_t *function, size_t index, size_t call, lily_err *err) {
    const json_t *arguments = json_object_get(function, "arguments");
    json_t *object = NULL;
    if (!arguments || json_is_object(arguments)) return 0;
    if (json_is_string(arguments)) {
        const char *text = json_string_value(arguments);
        size_t begin = 0, end = json_string_length(arguments);
        utf8_strip(text, &begin, &end);
        lily_err why;
        if (begin < end && json_text_load("arguments", text + begin, end - begin, &object, &why)) {
            return ERR(err, LILY_EINVAL, "messages[%zu].tool_calls[%zu].function.%s", index, call,
                       why.msg);
        }
    }
    if (json_is_string(arguments) || json_is_null(arguments)) {
        if (!object || json_is_null(object)) { /* no arguments at all */
            json_decref(object);
            object = json_object();
        }
    }
    if (!json_is_object(object)) {
        json_decref(object);
        return ERR(err, LILY_EINVAL,
                   "messages[%zu].tool_calls[%zu].function.arguments: found another JSON type, "
                   "expected an object",
                   index, call);
    }
    return json_object_set_new(function, "arguments", object) ? ERR_NOMEM(err, "messages") : 0;
}

static int mend_tool_calls(json_t *message, size_t index, lily_err *err) {
    json_t *calls = json_object_get(message, "tool_calls");
    if (!calls || json_is_null(calls)) return 0;
    if (!json_is_array(calls)) return bad(err, index, ".tool_calls", "no array", "an array");
    size_t i;
    json_t *call;
    json_array_foreach(calls, i, call) {
        json_t *function = json_object_get(call, "function");
        if (!function) function = call;
        if (!json_is_string(json_object_get(function, "name"))) {
            return ERR(err, LILY_EINVAL,
                       "messages[%zu].tool_calls[%zu].function.name: found no name, expected a "
                       "string",
                       index, i);
        }
        int rc = mend_arguments(function, index, i, err);
        if (rc) return rc;
    }
    return 0;
}

/* All that can be done to a message on its own. */
static int mend_message(json_t *message, size_t index, lily_err *err) {
    if (!json_is_object(message)) {
        return bad(err, index, "", "another JSON type", "an object with role and content");
    }
    int rc = mend_role(message, index, err);
    if (!rc) rc = mend_content(message, index, err);
    if (!rc) rc = mend_reasoning(message, err);
    if (!rc) rc = mend_function_call(message, err);
    if (!rc) rc = mend_tool_calls(message, index, err);
    return rc;
}

/* text = text + between + the content of message. */
static bool append_content(struct buf *text, const char *between, const json_t *message) {
    const json_t *content = json_object_get(message, "content");
    if (!json_is_string(content)) return true;
    return buf_puts(text, between) &&
           buf_append(text, json_string_value(content), json_string_length(content));
}

/* Whether a message has no text: as a turn of its own it would only cost tokens. */
static bool is_blank(const json_t *message) {
    const json_t *content = json_object_get(message, "content");
    size_t begin = 0, end = json_string_length(content);
    if (end) utf8_strip(json_string_value(content), &begin, &end);
    return begin == end;
}

static int append_turn(json_t *out, const char *role, const struct buf *text, lily_err *err) {
    json_t *content = json_stringn(text->len ? text->data : "", text->len);
    json_t *turn = json_pack("{s:s, s:o}", "role", role, "content", content);
    return json_array_append_new(out, turn) ? ERR_NOMEM(err, "messages") : 0;
}

/* The template allows one system message, the first. Those at the beginning are merged into it; a
 * later one stays where it is, as a marked turn of the user, because moving it to the front would
 * change the prompt from its first token on and so undo everything that is cached. */
static int place_system_messages(const json_t *messages, json_t *out, lily_err *err) {
    struct buf text = {0};
    size_t n = json_array_size(messages), i = 0;
    int rc = 0;
    bool ok = true;
    for (; i < n && has_role(json_array_get(messages, i), "system"); i++) {
        ok = ok && append_content(&text, text.len ? "\n\n" : "", json_array_get(messages, i));
    }
    if (i > 0) rc = ok ? append_turn(out, "system", &text, err) : ERR_NOMEM(err, "messages");
    for (; !rc && i < n; i++) {
        json_t *message = json_array_get(messages, i);
        if (!has_role(message, "system")) {
            if (json_array_append(out, message)) rc = ERR_NOMEM(err, "messages");
        } else if (!is_blank(message)) {
            buf_clear(&text);
            rc = append_content(&text, late_system_mark, message)
                     ? append_turn(out, "user", &text, err)
                     : ERR_NOMEM(err, "messages");
        }
    }
    buf_free(&text);
    return rc;
}

int chat_mend(const json_t *messages, json_t **out, lily_err *err) {
    if (!json_is_array(messages)) {
        return ERR(err, LILY_EINVAL, "messages: found no array, expected an array of messages");
    }
    json_t *copy = json_deep_copy(messages), *placed = json_array(), *message;
    int rc = copy && placed ? 0 : ERR_NOMEM(err, "messages");
    size_t i;
    json_array_foreach(copy, i, message) {
        if (!rc) rc = mend_message(message, i, err);
    }
    if (!rc) rc = place_system_messages(copy, placed, err);
    json_decref(copy);
    if (rc)
        json_decref(placed);
    else
        *out = placed;
    return rc;
}
