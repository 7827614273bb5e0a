#include "serve/messages.h"

#include <stdio.h>
#include <string.h>

#include "serve/fields.h"

#define PATH_SIZE 160

/* One element of an array of content parts. */
static int part_check(const json_t *part, const char *path, struct api_error *err) {
    static const char *const types[] = {"text", "input_text", "output_text", "refusal"};
    const char *type = "text", *text = NULL;
    bool known = false;
    if (json_is_string(part)) return 0;
    if (!json_is_object(part)) return field_wrong(path, "", part, "an object with a type", err);
    if (field_string(part, path, "type", &type, err)) return -1;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) known |= !strcmp(type, types[i]);
    if (!known) {
        return api_error_set(err, 400, "unsupported_value", path,
                             "%s: found a part of type \"%.40s\", expected \"text\"; this model "
                             "is served for text only",
                             path, type);
    }
    const char *field = strcmp(type, "refusal") ? "text" : "refusal";
    if (field_string(part, path, field, &text, err)) return -1;
    return text ? 0 : field_wrong(path, field, NULL, "a string", err);
}

static int content_check(const json_t *message, const char *path, struct api_error *err) {
    const json_t *content = field_get(message, "content");
    if (!content || json_is_string(content)) return 0; /* null and absent are empty */
    if (!json_is_array(content)) {
        return field_wrong(path, "content", content, "a string or an array of parts", err);
    }
    size_t i;
    json_t *part;
    json_array_foreach(content, i, part) {
        char at[PATH_SIZE];
        snprintf(at, sizeof at, "%s.content[%zu]", path, i);
        if (part_check(part, at, err)) return -1;
    }
    return 0;
}

/* A call's name and arguments: an object or its JSON text, which is parsed where the prompt is
 * rendered. */
static int function_check(const json_t *function, const char *path, struct api_error *err) {
    const char *name = NULL;
    if (field_string(function, path, "name", &name, err)) return -1;
    if (!name) return field_wrong(path, "name", NULL, "a string", err);
    const json_t *arguments = field_get(function, "arguments");
    if (!arguments || json_is_string(arguments) || json_is_object(arguments)) return 0;
    return field_wrong(path, "arguments", arguments, "a string of JSON or an object", err);
}

/* A call of an earlier assistant turn. */
static int call_check(const json_t *call, const char *path, struct api_error *err) {
    const char *text = NULL, *type = "function";
    json_t *function;
    if (!json_is_object(call)) return field_wrong(path, "", call, "an object", err);
    if (field_string(call, path, "id", &text, err) || field_string(call, path, "type", &type, err))
        return -1;
    if (strcmp(type, "function")) {
        return api_error_set(err, 400, "unsupported_value", path,
                             "%s: found a call of type \"%.40s\", expected \"function\"", path,
                             type);
    }
    if (field_object(call, path, "function", &function, err)) return -1;
    if (!function) return function_check(call, path, err);
    char at[PATH_SIZE];
    snprintf(at, sizeof at, "%.140s.function", path);
    return function_check(function, at, err);
}

static int calls_check(const json_t *message, const char *path, struct api_error *err) {
    const json_t *calls = field_get(message, "tool_calls");
    if (!calls) return 0;
    if (!json_is_array(calls)) return field_wrong(path, "tool_calls", calls, "an array", err);
    size_t i;
    json_t *call;
    json_array_foreach(calls, i, call) {
        char at[PATH_SIZE];
        snprintf(at, sizeof at, "%s.tool_calls[%zu]", path, i);
        if (call_check(call, at, err)) return -1;
    }
    return 0;
}

static int message_check(const json_t *message, const char *path, struct api_error *err) {
    static const char *const roles[] = {"system",    "developer", "user",
                                        "assistant", "tool",      "function"};
    static const char *const strings[] = {"name", "tool_call_id", "reasoning_content", "reasoning"};
    const char *role = NULL, *text = NULL;
    if (!json_is_object(message)) return field_wrong(path, "", message, "an object", err);
    if (field_string(message, path, "role", &role, err)) return -1;
    if (!role) return field_wrong(path, "role", NULL, "a string", err);
    bool known = false;
    json_t *call;
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) known |= !strcmp(role, roles[i]);
    if (!known) {
        char at[PATH_SIZE];
        snprintf(at, sizeof at, "%s.role", path);
        return api_error_set(err, 400, "invalid_value", at,
                             "%s: found \"%.40s\", expected system, developer, user, assistant or "
                             "tool",
                             at, role);
    }
    for (size_t i = 0; i < sizeof strings / sizeof *strings; i++) {
        if (field_string(message, path, strings[i], &text, err)) return -1;
    }
    if (content_check(message, path, err) || calls_check(message, path, err) ||
        field_object(message, path, "function_call", &call, err))
        return -1;
    if (!call) return 0;
    char at[PATH_SIZE]; /* the form before tool_calls */
    snprintf(at, sizeof at, "%s.function_call", path);
    return function_check(call, at, err);
}

int messages_check(const json_t *messages, struct api_error *err) {
    static const char expected[] = "an array of at least one message";
    if (!json_is_array(messages)) return field_wrong("messages", "", messages, expected, err);
    if (!json_array_size(messages)) {
        return api_error_set(err, 400, "invalid_value", "messages",
                             "messages: found an empty array, expected %s", expected);
    }
    size_t i;
    json_t *message;
    json_array_foreach(messages, i, message) {
        char at[64];
        snprintf(at, sizeof at, "messages[%zu]", i);
        if (message_check(message, at, err)) return -1;
    }
    return 0;
}

static int tool_check(const json_t *tool, const char *path, struct api_error *err) {
    const char *type = "function", *name = NULL, *text = NULL;
    bool strict = false;
    json_t *function, *parameters;
    if (!json_is_object(tool)) return field_wrong(path, "", tool, "an object", err);
    if (field_string(tool, path, "type", &type, err)) return -1;
    if (strcmp(type, "function")) {
        return api_error_set(err, 400, "unsupported_value", path,
                             "%s: found a tool of type \"%.40s\", expected \"function\"", path,
                             type);
    }
    if (field_object(tool, path, "function", &function, err)) return -1;
    if (!function) return field_wrong(path, "function", NULL, "an object", err);
    char at[PATH_SIZE];
    snprintf(at, sizeof at, "%.140s.function", path);
    if (field_string(function, at, "name", &name, err) ||
        field_string(function, at, "description", &text, err) ||
        field_bool(function, at, "strict", &strict, err) ||
        field_object(function, at, "parameters", &parameters, err))
        return -1;
    return name && name[0] ? 0 : field_wrong(at, "name", NULL, "a non-empty string", err);
}

int tools_check(const json_t *tools, struct api_error *err) {
    if (!json_is_array(tools)) return field_wrong("tools", "", tools, "an array", err);
    size_t i;
    json_t *tool;
    json_array_foreach(tools, i, tool) {
        char at[64];
        snprintf(at, sizeof at, "tools[%zu]", i);
        if (tool_check(tool, at, err)) return -1;
    }
    return 0;
}
