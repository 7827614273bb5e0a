#include "text/utf8.h"

#include <string.h>

#include "base/buf.h"
#include "text/tokenizer.h"

/* How many bytes follow a lead byte: 0 for ASCII, -1 for a byte that starts nothing. */
static int continuation_count(unsigned char lead) {
    if (lead < 0x80) return 0;
    if (lead < 0xc2) return -1; /* a continuation byte, or the lead of an overlong form */
    if (lead < 0xe0) return 1;
    if (lead < 0xf0) return 2;
    return lead < 0xf5 ? 3 : -1;
}

/* Whether c may follow seq[have]. Only the second byte is restricted further than 80..BF: it is
 * what rules out overlong forms, surrogates and values above U+10FFFF (Unicode, table 3-7). */
static bool may_follow(const unsigned char *seq, int have, unsigned char c) {
    unsigned char low = 0x80, high = 0xbf;
    if (have == 1) {
        if (seq[0] == 0xe0) low = 0xa0;
        if (seq[0] == 0xed) high = 0x9f;
        if (seq[0] == 0xf0) low = 0x90;
        if (seq[0] == 0xf4) high = 0x8f;
    }
    return c >= low && c <= high;
}

size_t utf8_invalid_at(const char *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text;
    size_t i = 0;
    while (i < n) {
        int more = continuation_count(s[i]);
        if (more < 0 || (size_t)more >= n - i) return i;
        for (int k = 1; k <= more; k++) {
            if (!may_follow(s + i, k, s[i + (size_t)k])) return i;
        }
        i += (size_t)more + 1;
    }
    return n;
}

uint32_t utf8_decode(const char *text, size_t *len) {
    const unsigned char *s = (const unsigned char *)text;
    if (s[0] < 0x80) {
        *len = 1;
        return s[0];
    }
    if (s[0] < 0xe0) {
        *len = 2;
        return (s[0] & 0x1fu) << 6 | (s[1] & 0x3fu);
    }
    if (s[0] < 0xf0) {
        *len = 3;
        return (s[0] & 0x0fu) << 12 | (s[1] & 0x3fu) << 6 | (s[2] & 0x3fu);
    }
    *len = 4;
    return (s[0] & 0x07u) << 18 | (s[1] & 0x3fu) << 12 | (s[2] & 0x3fu) << 6 | (s[3] & 0x3fu);
}

/* Python's str.isspace: White_Space and the four separators U+001C..U+001F, which its tables count
 * as whitespace because their bidirectional class is B or S. */
static bool is_python_space(uint32_t c) {
    return (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
           c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

void utf8_strip(const char *text, size_t *begin, size_t *end) {
    size_t len;
    while (*begin < *end && is_python_space(utf8_decode(text + *begin, &len))) *begin += len;
    while (*begin < *end) {
        size_t last = *end - 1;
        while (last > *begin && ((unsigned char)text[last] & 0xc0) == 0x80) last--;
        if (!is_python_space(utf8_decode(text + last, &len))) break;
        *end = last;
    }
}

static const char replacement[] = "\xef\xbf\xbd"; /* U+FFFD */

bool utf8_stream_push(struct utf8_stream *s, const char *bytes, size_t n, struct buf *out) {
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)bytes[i];
        if (s->n_pending > 0 && !may_follow(s->pending, s->n_pending, c)) {
            /* One mark for the whole unfinished sequence, then c is looked at afresh. */
            if (!buf_puts(out, replacement)) return false;
            s->n_pending = 0;
        }
        if (s->n_pending == 0 && continuation_count(c) < 0) {
            if (!buf_puts(out, replacement)) return false;
            continue;
        }
        s->pending[s->n_pending++] = c;
        if (s->n_pending == continuation_count(s->pending[0]) + 1) {
            if (!buf_append(out, s->pending, (size_t)s->n_pending)) return false;
            s->n_pending = 0;
        }
    }
    return true;
}

bool utf8_stream_flush(struct utf8_stream *s, struct buf *out) {
    if (s->n_pending == 0) return true;
    s->n_pending = 0;
    return buf_puts(out, replacement);
}
