#include "cli/output.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/file.h"
#include "cli/interrupt.h"
#include "cli/options.h"

/* The library cancels because we asked it to: "interrupted" says more than its own words. */
int fail(const lily_err *err) {
    if (err->code == LILY_ECANCELED && interrupted()) {
        fputs("lily: interrupted\n", stderr);
        return 128 + interrupted();
    }
    return fail_text("%s", err->msg[0] ? err->msg : lily_strerror(err->code));
}

int fail_text(const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fputs("lily: ", stderr);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fputc('\n', stderr);
    return EXIT_FAILED;
}

/* Nine digits bring a float back exactly. */
int print_json(json_t *doc) {
    if (!doc) return fail_text("JSON output: out of memory or text that is not UTF-8");
    json_dumpf(doc, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    putchar('\n');
    json_decref(doc);
    return EXIT_OK;
}

json_t *words_json(const char *words) {
    json_t *text = json_string(words);
    char *copy = text ? NULL : strdup(words);
    if (!copy) return text;
    err_clean(copy);
    text = json_string(copy);
    free(copy);
    return text;
}

/* The library's own text: a fault here is a fault of the program, and still no crash. */
json_t *take_json(char *text, const char *from) {
    json_error_t at;
    json_t *doc = json_loads(text, JSON_DECODE_ANY, &at);
    if (!doc) fail_text("%s: found invalid JSON (line %d: %s)", from, at.line, at.text);
    free(text);
    return doc;
}

/* Whether the other end of standard output is closed: asked after the fact, because stdio does not
 * keep the errno of a write that failed while a table was printed. */
static bool reader_left(void) {
    struct pollfd out = {.fd = STDOUT_FILENO};
    return poll(&out, 1, 0) > 0 && (out.revents & (POLLERR | POLLHUP));
}

static int output_errno; /* of the first flush that failed */

/* stdio drops the errno of a failed write by the time anybody asks; here it is fresh. */
bool output_flush(void) {
    errno = 0;
    if (fflush(stdout) == 0) return true;
    if (!output_errno) output_errno = errno;
    return false;
}

/* The last word on the exit status: a result that did not reach its file is a failure, one whose
 * reader had enough is not. */
int output_status(int status) {
    if (output_flush() && !ferror(stdout)) return status;
    if (output_errno == EPIPE || reader_left()) return status;
    fail_text("standard output: %s", output_errno ? strerror(output_errno) : "write failed");
    return status == EXIT_OK ? EXIT_FAILED : status;
}

/* A signal ends the wait for a slow writer or a person. */
static int read_stdin(size_t limit, struct buf *out, lily_err *err) {
    char chunk[65536];
    size_t n;
    while ((n = fread(chunk, 1, sizeof chunk, stdin)) > 0) {
        if (out->len + n > limit)
            return ERR(err, LILY_EINVAL, "standard input: found more than %zu bytes", limit);
        if (!buf_append(out, chunk, n)) return ERR_NOMEM(err, "standard input");
    }
    if (interrupted()) return ERR(err, LILY_ECANCELED, "standard input: interrupted");
    if (ferror(stdin))
        return ERR(err, err_from_errno(errno), "standard input: %s", strerror(errno));
    return LILY_OK;
}

int read_input(const char *path, size_t limit, struct buf *out, lily_err *err) {
    if (strcmp(path, "-") == 0) return read_stdin(limit, out, err);
    char *data;
    size_t size;
    int rc = file_read(path, limit, &data, &size, err);
    if (rc) return rc;
    bool ok = buf_append(out, data, size);
    free(data);
    return ok ? LILY_OK : ERR_NOMEM(err, path);
}

int read_operand(const char *operand, size_t limit, struct buf *out, lily_err *err) {
    if (strcmp(operand, "-") == 0) return read_stdin(limit, out, err);
    return buf_puts(out, operand) ? LILY_OK : ERR_NOMEM(err, "text");
}

/* The library parses the text again and says what is wrong with a message or a tool; but it does
 * not know the file, and a fault in it should be found before a model is loaded. Integers beyond 64
 * bits and U+0000 are accepted there and so here. */
int read_json_array(const char *path, struct buf *out, lily_err *err) {
    json_error_t at;
    int rc = read_input(path, INPUT_LIMIT, out, err);
    if (rc) return rc;
    json_t *doc = json_loadb(out->len ? out->data : "", out->len,
                             JSON_DECODE_ANY | JSON_DECODE_INT_AS_REAL | JSON_ALLOW_NUL, &at);
    const bool array = json_is_array(doc), json = doc != NULL;
    json_decref(doc);
    if (array) return LILY_OK;
    if (json) return ERR(err, LILY_EFORMAT, "%s: found other JSON, expected an array", path);
    return ERR(err, LILY_EFORMAT, "%s: found %s in line %d, expected a JSON array", path, at.text,
               at.line);
}

/* Escape sequences can retitle windows, move the cursor over earlier text and, on some terminals,
 * type for the user; a model may be made to write them. C1 controls are the same in one byte. */
bool write_printable(FILE *to, const char *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text;
    for (size_t i = 0; i < n; i++) {
        bool c0 = (s[i] < 0x20 && s[i] != '\n' && s[i] != '\t') || s[i] == 0x7f;
        bool c1 = s[i] == 0xc2 && i + 1 < n && s[i + 1] >= 0x80 && s[i + 1] < 0xa0;
        if (c0)
            fputc('^', to), fputc(s[i] ^ 0x40, to);
        else if (c1)
            fprintf(to, "^[%c", s[++i] - 0x40);
        else
            fputc(s[i], to);
    }
    return !ferror(to);
}

char *format_bytes(char *out, size_t room, double bytes) {
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int k = 0;
    while (bytes >= 1024 && k < 4) bytes /= 1024, k++;
    snprintf(out, room, "%.*f %s", k ? 1 : 0, bytes, unit[k]);
    return out;
}

uint64_t peak_memory(void) {
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage)) return 0;
#if defined(__APPLE__)
    return (uint64_t)usage.ru_maxrss; /* bytes there, KiB elsewhere */
#else
    return (uint64_t)usage.ru_maxrss * 1024;
#endif
}
