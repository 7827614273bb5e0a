/* Which JSON type an argument of a tool call should have, and its text as JSON of that type. */
#ifndef LILY_TEXT_TOOL_TYPES_H
#define LILY_TEXT_TOOL_TYPES_H

#include <jansson.h>

#include "base/buf.h"

enum tool_type {
    TOOL_STRING = 1,
    TOOL_INTEGER = 2,
    TOOL_NUMBER = 4,
    TOOL_BOOLEAN = 8,
    TOOL_NULL = 16,
    TOOL_OBJECT = 32,
    TOOL_ARRAY = 64,
    TOOL_ANY = 127,
};

/* The parameters schema of the tool called name in tools (OpenAI's list, or NULL); NULL: none. */
const json_t *tool_parameters(const json_t *tools, const char *name);

/* The types (a set of tool_type) that the schema allows for the argument key. An argument that the
 * schema does not describe is a string, as is every argument of an unknown tool. */
unsigned tool_argument_types(const json_t *parameters, const char *key);

/* Appends the argument text[n] (valid UTF-8) as JSON of one of the types, tried from the narrowest;
 * a text that is none of them stays a string. false: out of memory. */
bool tool_argument_json(unsigned types, const char *text, size_t n, struct buf *out);

#endif
