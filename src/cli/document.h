/* A JSON document shown to a person: objects as names and values, lists of objects and objects of
 * objects as tables. Integers whose name ends in "bytes" are shown in binary multiples. */
#ifndef LILY_CLI_DOCUMENT_H
#define LILY_CLI_DOCUMENT_H

#include <jansson.h>

/* byte_names: further names of integers that count bytes, ended by NULL; may be NULL. */
void print_document(const json_t *doc, const char *const *byte_names);

#endif
