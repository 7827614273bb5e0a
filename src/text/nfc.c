/* utf8proc decomposes and composes; the canonical ordering between the two is done here. utf8proc's
 * own ordering swaps neighbours, which is quadratic in a run of combining marks, and such a run can
 * be as long as a client likes. */
#include "text/nfc.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "text/utf8.h"

bool nfc_is_plain(const char *text, size_t n) {
    /* Below U+0300 every code point is a starter and stays as it is, and composition needs a second
     * code point from U+0300 on. 0xCC is the first lead byte of that range. */
    for (size_t i = 0; i < n; i++) {
        if ((unsigned char)text[i] >= 0xcc) return false;
    }
    return true;
}

/* Sorts a run of combining marks by class, keeping the order of equal classes: a counting sort, as
 * there are only 256 classes. scratch: [n]. */
static void order_marks(int32_t *marks, int32_t *scratch, size_t n) {
    size_t start[257] = {0};
    for (size_t i = 0; i < n; i++) start[utf8proc_get_property(marks[i])->combining_class + 1]++;
    for (int c = 0; c < 256; c++) start[c + 1] += start[c];
    for (size_t i = 0; i < n; i++) {
        scratch[start[utf8proc_get_property(marks[i])->combining_class]++] = marks[i];
    }
    memcpy(marks, scratch, n * sizeof *marks);
}

static void order_canonically(int32_t *cp, int32_t *scratch, size_t n) {
    for (size_t i = 0; i < n;) {
        if (utf8proc_get_property(cp[i])->combining_class == 0) {
            i++;
            continue;
        }
        size_t end = i + 1;
        bool sorted = true;
        while (end < n && utf8proc_get_property(cp[end])->combining_class != 0) {
            sorted = sorted && utf8proc_get_property(cp[end - 1])->combining_class <=
                                   utf8proc_get_property(cp[end])->combining_class;
            end++;
        }
        if (!sorted) order_marks(cp + i, scratch, end - i);
        i = end;
    }
}

/* Decomposes text into cp[cap]; returns the number of code points. cap always suffices: no
 * canonical decomposition has more than four code points per code point, and a code point that
 * decomposes has at least two bytes. */
static size_t decompose(const char *text, size_t n, int32_t *cp, size_t cap) {
    size_t count = 0;
    for (size_t i = 0, len; i < n; i += len) {
        int boundclass = 0;
        int32_t c = (int32_t)utf8_decode(text + i, &len);
        utf8proc_ssize_t got =
            utf8proc_decompose_char(c, cp + count, (utf8proc_ssize_t)(cap - count),
                                    UTF8PROC_STABLE | UTF8PROC_COMPOSE, &boundclass);
        if (got > 0) count += (size_t)got;
    }
    return count;
}

int nfc_append(const char *text, size_t n, struct buf *out, lily_err *err) {
    if (n > (size_t)1 << 30) {
        return ERR(err, LILY_EINVAL, "text: found %zu bytes, expected at most 1 GiB", n);
    }
    size_t cap = 2 * n + 4;
    int32_t *cp = malloc(cap * sizeof *cp);
    int32_t *scratch = malloc(cap * sizeof *scratch);
    int rc = ERR_NOMEM(err, "normalising text");
    if (!cp || !scratch) goto out;

    size_t count = decompose(text, n, cp, cap);
    order_canonically(cp, scratch, count);
    utf8proc_ssize_t left =
        utf8proc_normalize_utf32(cp, (utf8proc_ssize_t)count, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (left < 0 || !buf_reserve(out, 4 * (size_t)left)) goto out;
    for (utf8proc_ssize_t i = 0; i < left; i++) {
        out->len += (size_t)utf8proc_encode_char(cp[i], (uint8_t *)out->data + out->len);
    }
    out->data[out->len] = 0;
    rc = 0;
out:
    free(cp);
    free(scratch);
    return rc;
}
