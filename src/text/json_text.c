/* Parsing is jansson's. Writing is done here because prompts need Python's format to the byte,
 * which jansson's own writer does not give (numbers, and what it escapes). */
#include "text/json_text.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

bool json_text_append_escaped(struct buf *out, const char *text, size_t n) {
    static const char short_form[] = "\"\"\\\\\bb\ff\nn\rr\tt"; /* character, letter */
    size_t done = 0;                                            /* text before this is written */
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c >= 0x20 && c != '"' && c != '\\') continue;
        if (!buf_append(out, text + done, i - done)) return false;
        done = i + 1;
        size_t k = 0;
        while (short_form[k] && (unsigned char)short_form[k] != c) k += 2;
        char escape[2] = {'\\', short_form[k + (short_form[k] != 0)]};
        bool ok = short_form[k] ? buf_append(out, escape, 2) : buf_printf(out, "\\u%04x", c);
        if (!ok) return false;
    }
    return buf_append(out, text + done, n - done);
}

/* The fewest digits that read back as v, as Python's repr prints them: v = 0.d1d2... * 10^*point
 * without its sign. Returns the number of digits. */
static int shortest_digits(double v, char digits[20], int *point) {
    char text[40];
    uint64_t mantissa = 0;
    int exponent = 0;
    for (int precision = 0; precision < 17; precision++) {
        snprintf(text, sizeof text, "%.*e", precision, fabs(v));
        const char *p = text;
        for (mantissa = 0; *p != 'e'; p++) { /* skips the point, whatever the locale has for it */
            if (isdigit((unsigned char)*p)) mantissa = 10 * mantissa + (uint64_t)(*p - '0');
        }
        exponent = atoi(p + 1) - precision;
        if (strtod(text, NULL) == fabs(v)) break;
        /* Doubles are twice as far apart above a power of two as below it: the next decimal up can
         * read back although the nearest one does not. */
        snprintf(text, sizeof text, "%" PRIu64 "e%d", mantissa + 1, exponent);
        if (strtod(text, NULL) == fabs(v)) {
            mantissa++;
            break;
        }
    }
    int n = snprintf(digits, 20, "%" PRIu64, mantissa);
    *point = exponent + n;
    while (n > 1 && digits[n - 1] == '0') n--;
    digits[n] = 0;
    return n;
}

/* As Python's repr: fixed notation from 1e-4 up to below 1e16, always with a point or an exponent.
 */
static bool append_real(struct buf *out, double v) {
    char digits[20];
    int point, n = shortest_digits(v, digits, &point);
    const char *sign = signbit(v) ? "-" : "";
    if (point > 16 || point < -3) { /* from 1e16 on and below 1e-4 */
        return buf_printf(out, "%s%c%s%se%+03d", sign, digits[0], n > 1 ? "." : "", digits + 1,
                          point - 1);
    }
    if (point <= 0) return buf_printf(out, "%s0.%.*s%s", sign, -point, "000", digits);
    if (n <= point)
        return buf_printf(out, "%s%s%.*s.0", sign, digits, point - n, "0000000000000000");
    return buf_printf(out, "%s%.*s.%s", sign, point, digits, digits + point);
}

static bool append_string(struct buf *out, const char *text, size_t n) {
    return buf_puts(out, "\"") && json_text_append_escaped(out, text, n) && buf_puts(out, "\"");
}

static bool append_object(struct buf *out, const json_t *v) {
    if (!buf_puts(out, "{")) return false;
    const char *key, *comma = "";
    json_t *value;
    json_object_foreach((json_t *)v, key, value) {
        if (!buf_puts(out, comma) || !append_string(out, key, strlen(key)) ||
            !buf_puts(out, ": ") || !json_text_append(out, value)) {
            return false;
        }
        comma = ", ";
    }
    return buf_puts(out, "}");
}

static bool append_array(struct buf *out, const json_t *v) {
    if (!buf_puts(out, "[")) return false;
    size_t i;
    json_t *value;
    json_array_foreach(v, i, value) {
        if (i && !buf_puts(out, ", ")) return false;
        if (!json_text_append(out, value)) return false;
    }
    return buf_puts(out, "]");
}

bool json_text_append(struct buf *out, const json_t *v) {
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return append_object(out, v);
    case JSON_ARRAY:
        return append_array(out, v);
    case JSON_STRING:
        return append_string(out, json_string_value(v), json_string_length(v));
    case JSON_INTEGER:
        return buf_printf(out, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
    case JSON_REAL:
        return append_real(out, json_real_value(v));
    case JSON_TRUE:
        return buf_puts(out, "true");
    case JSON_FALSE:
        return buf_puts(out, "false");
    default:
        return buf_puts(out, "null");
    }
}

/* Copies text with "e0" after each integer that does not fit 64 bits, which makes it a real. */
static bool widen_integers(const char *text, size_t n, struct buf *out) {
    bool in_string = false;
    for (size_t i = 0; i < n;) {
        size_t begin = i;
        bool number = !in_string && (text[i] == '-' || isdigit((unsigned char)text[i]));
        if (!number) {
            if (in_string && text[i] == '\\' && i + 1 < n) i++;
            if (text[i] == '"' && i == begin) in_string = !in_string;
            i++;
        }
        while (number && i < n && (isalnum((unsigned char)text[i]) || strchr("+-.", text[i]))) i++;
        if (!buf_append(out, text + begin, i - begin)) return false;
        if (!number) continue;
        bool integer = memchr(text + begin, '.', i - begin) == NULL &&
                       memchr(text + begin, 'e', i - begin) == NULL &&
                       memchr(text + begin, 'E', i - begin) == NULL;
        errno = 0;
        if (integer) strtoll(out->data + out->len - (i - begin), NULL, 10);
        if (integer && errno == ERANGE && !buf_puts(out, "e0")) return false;
    }
    return true;
}

int json_text_load(const char *what, const char *text, size_t n, json_t **out, lily_err *err) {
    const size_t flags = JSON_DECODE_ANY | JSON_ALLOW_NUL;
    json_error_t why;
    *out = json_loadb(text, n, flags, &why);
    if (!*out && json_error_code(&why) == json_error_numeric_overflow) {
        struct buf wide = {0};
        if (!widen_integers(text, n, &wide)) {
            buf_free(&wide);
            return ERR_NOMEM(err, what);
        }
        *out = json_loadb(wide.data, wide.len, flags, &why);
        buf_free(&wide);
    }
    if (*out) return 0;
    if (json_error_code(&why) == json_error_out_of_memory) return ERR_NOMEM(err, what);
    return ERR(err, LILY_EINVAL, "%s: found %s at byte %d, expected JSON", what, why.text,
               why.position);
}
