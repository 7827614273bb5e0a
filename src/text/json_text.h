/* JSON read from clients, and JSON written into prompts as Python's json.dumps writes it. */
#ifndef LILY_TEXT_JSON_TEXT_H
#define LILY_TEXT_JSON_TEXT_H

#include <jansson.h>

#include "base/buf.h"

/* Parses text[n]; *out belongs to the caller. Three things are decided here for every client:
 * an escaped NUL is a character like any other; an integer beyond 64 bits (tool schemas generated
 * from unsigned types have them) becomes the nearest double; a lone surrogate or invalid UTF-8 is
 * LILY_EINVAL, as everything else that is not JSON, naming `what` and the byte offset. */
int json_text_load(const char *what, const char *text, size_t n, json_t **out, lily_err *err);

/* Appends v as json.dumps(v, ensure_ascii=False) has it: ", " and ": ", keys in their order, only
 * quotes, backslashes and control characters escaped, doubles with the fewest digits that read back
 * as the same number. false: out of memory. */
bool json_text_append(struct buf *out, const json_t *v);

/* Appends text[n] escaped for the inside of a JSON string, without the quotes. */
bool json_text_append_escaped(struct buf *out, const char *text, size_t n);

#endif
