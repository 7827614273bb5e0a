/* The tables of a bench report: on the terminal row by row, and in Markdown. */
#ifndef LILY_CLI_REPORT_TABLE_H
#define LILY_CLI_REPORT_TABLE_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include "base/buf.h"

void report_print_head(FILE *to);
void report_print_row(FILE *to, bool decode, const json_t *row);

/* Appends the document as Markdown; false: out of memory. */
bool report_table(const json_t *doc, struct buf *out);

#endif
