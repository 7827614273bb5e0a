/* JSON at the network's edge: bodies are scanned before they are parsed, so that what a parser
 * would build from them is bounded and a fault can be named by its path; what goes out is escaped
 * so that no reader splits it. */
#ifndef LILY_SERVE_JSON_SAFE_H
#define LILY_SERVE_JSON_SAFE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"

#define JSAFE_MAX_DEPTH  128
#define JSAFE_MAX_VALUES 250000 /* a parsed value takes up to some 300 bytes: at most 75 MB */

enum jsafe_fault {
    JSAFE_OK,
    JSAFE_DEPTH,     /* nested deeper than JSAFE_MAX_DEPTH */
    JSAFE_VALUES,    /* more than JSAFE_MAX_VALUES keys and values */
    JSAFE_SURROGATE, /* an escaped half of a surrogate pair stands alone */
};

struct jsafe_report {
    enum jsafe_fault fault;
    size_t offset;  /* of the fault in the text */
    char path[160]; /* "messages[2].content"; keys as they are spelled in the text */
};

/* One pass over text[n], no allocation. Syntax is not checked: the parser does that. */
void jsafe_scan(const char *text, size_t n, struct jsafe_report *out);

/* A JSON string of text[n]; bytes that are not UTF-8 become '?'. NULL: out of memory. */
json_t *jsafe_string(const char *text, size_t n);

/* Appends compact JSON with U+0085, U+2028 and U+2029 escaped: some event-stream readers take them
 * for line ends. false: out of memory. */
bool jsafe_write(struct buf *out, const json_t *value);

#endif
