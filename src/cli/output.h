/* What a command says: errors on standard error, results on standard output. */
#ifndef LILY_CLI_OUTPUT_H
#define LILY_CLI_OUTPUT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/buf.h"
#include "lily_error.h"

/* "lily: <message>" on stderr. Returns EXIT_FAILED, or 128 + signal when the work was cancelled
 * because a signal came. */
int fail(const lily_err *err);
int fail_text(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Prints doc as the one JSON document on standard output and releases it. NULL (out of memory or
 * invalid UTF-8 while it was built) is an error. Returns the exit status. */
int print_json(json_t *doc);
/* The user's words (a path, a note) for a document: they need not be text, which JSON must be; what
 * is none becomes '?'. */
json_t *words_json(const char *words);
/* Parses a document that the library made; NULL with a message printed. Frees text. */
json_t *take_json(char *text, const char *from);

/* Flushes standard output. A failed write turns status into EXIT_FAILED with a message; a reader
 * that left (EPIPE) has had enough and is no failure. */
int output_status(int status);
/* Flushes and remembers why that failed; false: stop writing. */
bool output_flush(void);

/* The whole of a file, or of standard input for "-", appended to out; at most limit bytes. */
int read_input(const char *path, size_t limit, struct buf *out, lily_err *err);
enum { INPUT_LIMIT = 256 << 20 };
/* An operand that is text: its own, or that of standard input for "-". */
int read_operand(const char *operand, size_t limit, struct buf *out, lily_err *err);
/* The same of a file that holds a JSON array: messages or tools. */
int read_json_array(const char *path, struct buf *out, lily_err *err);

/* Text for a terminal: control characters that could steer it are shown as ^X. */
bool write_printable(FILE *to, const char *text, size_t n);

/* "19.5 GiB", "512 B"; returns out. */
char *format_bytes(char *out, size_t room, double bytes);
enum { BYTES_ROOM = 24 };

/* Most memory this process has held at once, in bytes. */
uint64_t peak_memory(void);

#endif
