/* A JSON document shown to a person: objects as names and values, lists of objects as tables. */
#ifndef LILY_CLI_DOCUMENT_H
#define LILY_CLI_DOCUMENT_H

#include <jansson.h>

void print_document(const json_t *doc);

#endif
