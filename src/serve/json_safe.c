#include "serve/json_safe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- scanning -------------------------------------------------------------------------------- */

struct frame {
    bool object;
    bool in_key;     /* object: the next string is a key */
    size_t index;    /* array: of the current element */
    const char *key; /* object: the current key as spelled, [key_len] */
    size_t key_len;
};

struct scan {
    const char *text;
    size_t n, at;
    size_t values;
    int depth; /* frames in use */
    struct frame frames[JSAFE_MAX_DEPTH];
    struct jsafe_report *report;
};

static void path_write(const struct scan *s, char *out, size_t size) {
    size_t used = 0;
    out[0] = 0;
    for (int i = 0; i < s->depth && used < size; i++) {
        const struct frame *f = &s->frames[i];
        int n = 0;
        if (!f->object) {
            n = snprintf(out + used, size - used, "[%zu]", f->index);
        } else if (f->key) {
            int len = f->key_len > 60 ? 60 : (int)f->key_len;
            n = snprintf(out + used, size - used, "%s%.*s", used ? "." : "", len, f->key);
        }
        if (n > 0) used += (size_t)n;
    }
}

static bool fault(struct scan *s, enum jsafe_fault kind, size_t offset) {
    s->report->fault = kind;
    s->report->offset = offset;
    path_write(s, s->report->path, sizeof s->report->path);
    return false;
}

/* The code unit of the four hex digits at p, or -1. */
static int hex4(const char *p, const char *end) {
    int unit = 0;
    if (end - p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) return -1;
        unit = unit * 16 + digit;
    }
    return unit;
}

/* Checks the escape whose backslash is at i; *next is where scanning goes on. */
static bool scan_escape(struct scan *s, size_t i, size_t *next) {
    const char *end = s->text + s->n;
    *next = i + 2;
    if (i + 1 >= s->n || s->text[i + 1] != 'u') return true;
    int unit = hex4(s->text + i + 2, end);
    if (unit < 0xd800 || unit > 0xdfff) return true;
    bool paired = unit < 0xdc00 && i + 7 < s->n && s->text[i + 6] == '\\' && s->text[i + 7] == 'u';
    int low = paired ? hex4(s->text + i + 8, end) : -1;
    if (low < 0xdc00 || low > 0xdfff) return fault(s, JSAFE_SURROGATE, i);
    *next = i + 12;
    return true;
}

/* The string whose opening quote is at s->at. */
static bool scan_string(struct scan *s) {
    struct frame *top = s->depth ? &s->frames[s->depth - 1] : NULL;
    size_t begin = s->at + 1, i = begin;
    bool key = top && top->object && top->in_key;
    if (key) top->key = NULL;
    while (i < s->n && s->text[i] != '"') {
        if (s->text[i] == '\\') {
            if (!scan_escape(s, i, &i)) return false;
        } else {
            i++;
        }
    }
    if (key) {
        top->key = s->text + begin;
        top->key_len = (i < s->n ? i : s->n) - begin;
    }
    s->at = i + 1;
    return true;
}

static bool scan_open(struct scan *s, bool object) {
    if (s->depth == JSAFE_MAX_DEPTH) return fault(s, JSAFE_DEPTH, s->at);
    s->frames[s->depth++] = (struct frame){.object = object, .in_key = object};
    s->at++;
    return true;
}

static bool scan_mark(struct scan *s, char c) {
    struct frame *top = s->depth ? &s->frames[s->depth - 1] : NULL;
    if (c == ',' && top) {
        top->index++;
        top->in_key = top->object;
    } else if (c == ':' && top) {
        top->in_key = false;
    } else if ((c == '}' || c == ']') && s->depth) {
        s->depth--;
    }
    s->at++;
    return true;
}

void jsafe_scan(const char *text, size_t n, struct jsafe_report *out) {
    struct scan s = {.text = text, .n = n, .report = out};
    *out = (struct jsafe_report){0};
    while (s.at < n) {
        char c = text[s.at];
        /* Every value but the first follows one of these, so they bound the values. */
        if ((c == '{' || c == '[' || c == ',' || c == ':') && ++s.values > JSAFE_MAX_VALUES) {
            fault(&s, JSAFE_VALUES, s.at);
            return;
        }
        bool ok = c == '"'               ? scan_string(&s)
                  : c == '{' || c == '[' ? scan_open(&s, c == '{')
                                         : scan_mark(&s, c);
        if (!ok) return;
    }
}

/* ---- writing --------------------------------------------------------------------------------- */

json_t *jsafe_string(const char *text, size_t n) {
    json_t *value = json_stringn(text, n);
    if (value) return value;
    char *plain = malloc(n + 1);
    if (!plain) return NULL;
    for (size_t i = 0; i < n; i++) plain[i] = (unsigned char)text[i] < 0x80 ? text[i] : '?';
    value = json_stringn(plain, n);
    free(plain);
    return value;
}

/* The escape of the line separator at p, and its length in bytes; NULL: p starts none. */
static const char *separator_escape(const unsigned char *p, size_t left, size_t *len) {
    if (left >= 2 && p[0] == 0xc2 && p[1] == 0x85) {
        *len = 2;
        return "\\u0085";
    }
    if (left >= 3 && p[0] == 0xe2 && p[1] == 0x80 && (p[2] == 0xa8 || p[2] == 0xa9)) {
        *len = 3;
        return p[2] == 0xa8 ? "\\u2028" : "\\u2029";
    }
    return NULL;
}

static bool write_escaped(struct buf *out, const char *bytes, size_t n) {
    size_t from = 0;
    for (size_t i = 0; i < n; i++) {
        size_t len;
        const char *escape = separator_escape((const unsigned char *)bytes + i, n - i, &len);
        if (!escape) continue;
        if (!buf_append(out, bytes + from, i - from) || !buf_puts(out, escape)) return false;
        from = i + len;
        i = from - 1;
    }
    return buf_append(out, bytes + from, n - from);
}

bool jsafe_write(struct buf *out, const json_t *value) {
    char *text =
        value ? json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(15)) : NULL;
    bool ok = text && write_escaped(out, text, strlen(text));
    free(text);
    return ok;
}
