/* The model writes arguments as bare text, so 5 may be a number or a string of one digit: only the
 * schema tells. Types are sets, since unions are common (a string or null). */
#include "text/tool_types.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "text/json_text.h"

const json_t *tool_parameters(const json_t *tools, const char *name) {
    size_t i;
    json_t *tool;
    json_array_foreach(tools, i, tool) {
        const json_t *function = json_object_get(tool, "function");
        if (!function) function = tool;
        const char *found = json_string_value(json_object_get(function, "name"));
        if (found && strcmp(found, name) == 0) return json_object_get(function, "parameters");
    }
    return NULL;
}

/* ---- schema to types ------------------------------------------------------------------------- */

/* The names of JSON Schema, and those of Python that schemas are often written with. */
static unsigned type_named(const char *name) {
    static const struct {
        const char *name;
        unsigned type;
    } names[] = {{"string", TOOL_STRING},   {"str", TOOL_STRING},    {"integer", TOOL_INTEGER},
                 {"int", TOOL_INTEGER},     {"number", TOOL_NUMBER}, {"float", TOOL_NUMBER},
                 {"boolean", TOOL_BOOLEAN}, {"bool", TOOL_BOOLEAN},  {"null", TOOL_NULL},
                 {"object", TOOL_OBJECT},   {"dict", TOOL_OBJECT},   {"array", TOOL_ARRAY},
                 {"list", TOOL_ARRAY},      {"tuple", TOOL_ARRAY}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (strcasecmp(names[i].name, name) == 0) return names[i].type;
    }
    return TOOL_ANY;
}

static unsigned type_of_value(const json_t *v) {
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return TOOL_OBJECT;
    case JSON_ARRAY:
        return TOOL_ARRAY;
    case JSON_STRING:
        return TOOL_STRING;
    case JSON_INTEGER:
        return TOOL_INTEGER;
    case JSON_REAL:
        return TOOL_NUMBER;
    case JSON_NULL:
        return TOOL_NULL;
    default:
        return TOOL_BOOLEAN;
    }
}

/* Follows "#/$defs/x" from the root of the parameters; NULL: it leads nowhere. */
static const json_t *resolve(const json_t *root, const char *reference) {
    if (strncmp(reference, "#/", 2) != 0) return NULL;
    for (const char *part = reference + 2; root && *part;) {
        size_t n = strcspn(part, "/");
        root = json_object_getn(root, part, n);
        part += n + (part[n] == '/');
    }
    return root;
}

enum { MAX_DEPTH = 16 }; /* of references and unions: more is a cycle */

static unsigned schema_types(const json_t *schema, const json_t *root, int depth);

static unsigned union_types(const json_t *schemas, const json_t *root, int depth) {
    unsigned types = 0;
    size_t i;
    json_t *schema;
    json_array_foreach(schemas, i, schema) types |= schema_types(schema, root, depth + 1);
    return types ? types : TOOL_ANY;
}

/* What the schema says, most direct statement first. */
static unsigned stated_types(const json_t *schema, const json_t *root, int depth) {
    const char *reference = json_string_value(json_object_get(schema, "$ref"));
    const json_t *type = json_object_get(schema, "type");
    const json_t *list = json_object_get(schema, "enum"), *value;
    unsigned types = 0;
    size_t i;
    if (json_is_string(type)) return type_named(json_string_value(type));
    if (json_is_array(type)) {
        json_array_foreach(type, i, value) {
            if (json_is_string(value)) types |= type_named(json_string_value(value));
        }
        return types ? types : TOOL_ANY;
    }
    if (reference) return schema_types(resolve(root, reference), root, depth + 1);
    if ((value = json_object_get(schema, "anyOf"))) return union_types(value, root, depth);
    if ((value = json_object_get(schema, "oneOf"))) return union_types(value, root, depth);
    if ((value = json_object_get(schema, "allOf"))) {
        const json_t *all = value;
        types = TOOL_ANY;
        json_array_foreach(all, i, value) types &= schema_types(value, root, depth + 1);
        return types ? types : TOOL_ANY;
    }
    if (json_array_size(list) > 0) {
        json_array_foreach(list, i, value) types |= type_of_value(value);
        return types;
    }
    if ((value = json_object_get(schema, "const"))) return type_of_value(value);
    if (json_object_get(schema, "properties")) return TOOL_OBJECT;
    return json_object_get(schema, "items") ? TOOL_ARRAY : TOOL_ANY;
}

static unsigned schema_types(const json_t *schema, const json_t *root, int depth) {
    if (depth > MAX_DEPTH || !json_is_object(schema)) return TOOL_ANY;
    unsigned types = stated_types(schema, root, depth);
    return json_is_true(json_object_get(schema, "nullable")) ? types | TOOL_NULL : types;
}

unsigned tool_argument_types(const json_t *parameters, const char *key) {
    const json_t *schema = json_object_get(json_object_get(parameters, "properties"), key);
    if (!schema) schema = json_object_get(parameters, "additionalProperties");
    return json_is_object(schema) ? schema_types(schema, parameters, 0) : TOOL_STRING;
}

/* ---- text to JSON ---------------------------------------------------------------------------- */

static bool is_word(const char *text, size_t n, const char *word) {
    return n == strlen(word) && strncasecmp(text, word, n) == 0;
}

/* Parses text as one JSON value; NULL when it is none. It is parsed inside an array, as deep as
 * it will lie in the arguments, and so that nothing can follow it. */
static json_t *parse_value(const char *text, size_t n) {
    struct buf array = {0};
    json_t *all = NULL, *value = NULL;
    lily_err ignored;
    bool ok = buf_puts(&array, "[") && buf_append(&array, text, n) && buf_puts(&array, "]");
    if (ok && json_text_load("argument", array.data, array.len, &all, &ignored) == 0) {
        if (json_array_size(all) == 1) value = json_incref(json_array_get(all, 0));
        json_decref(all);
    }
    buf_free(&array);
    return value;
}

/* Appends the number text[n] as an integer where only integers are allowed: 5.0 is 5. Nothing is
 * appended when it is no integer. */
static bool append_integer(const char *text, size_t n, double value, struct buf *out) {
    size_t digits = text[0] == '-';
    while (digits < n && isdigit((unsigned char)text[digits])) digits++;
    if (digits == n) return buf_append(out, text, n);
    if (value != trunc(value) || fabs(value) >= 9007199254740992.0) return true; /* 2^53 */
    return buf_printf(out, "%lld", (long long)value);
}

/* Appends text as JSON if it is a value of the types, else nothing. */
static bool append_value(unsigned types, const char *text, size_t n, struct buf *out) {
    /* A null is no value of the other types, so it is meant as one even where it is not listed. */
    if (is_word(text, n, "null") && (types & TOOL_NULL || !(types & TOOL_STRING))) {
        return buf_puts(out, "null");
    }
    if (types & TOOL_BOOLEAN && is_word(text, n, "true")) return buf_puts(out, "true");
    if (types & TOOL_BOOLEAN && is_word(text, n, "false")) return buf_puts(out, "false");
    json_t *value = parse_value(text, n);
    if (!value) return true;
    unsigned is = type_of_value(value);
    bool ok = true;
    if (json_is_number(value) && types & TOOL_NUMBER)
        ok = buf_append(out, text, n);
    else if (json_is_number(value) && types & TOOL_INTEGER)
        ok = append_integer(text, n, json_number_value(value), out);
    else if (is & types & (TOOL_OBJECT | TOOL_ARRAY))
        ok = buf_append(out, text, n);
    json_decref(value);
    return ok;
}

/* Whitespace around a value that is no string means nothing; a string keeps it. */
bool tool_argument_json(unsigned types, const char *text, size_t n, struct buf *out) {
    size_t begin = 0, end = n, before = out->len;
    while (begin < end && isspace((unsigned char)text[begin])) begin++;
    while (begin < end && isspace((unsigned char)text[end - 1])) end--;
    if (begin < end && types != TOOL_STRING) {
        if (!append_value(types, text + begin, end - begin, out)) return false;
        if (out->len > before) return true;
    }
    return buf_puts(out, "\"") && json_text_append_escaped(out, text, n) && buf_puts(out, "\"");
}
