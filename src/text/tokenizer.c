/* Encoding and look-ups. Text is cut at control tokens; each run between two of them is normalised,
 * split and merged on its own, as the Rust library does. */
#include "text/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "text/nfc.h"
#include "text/tokenizer_internal.h"
#include "text/utf8.h"

/* Room for extra more ids. */
static bool id_list_reserve(struct id_list *l, size_t extra) {
    size_t need, cap = l->cap ? l->cap : 64, bytes;
    if (!size_add(l->len, extra, &need)) return false;
    if (need <= l->cap) return true;
    while (cap < need) {
        if (!size_mul(cap, 2, &cap)) return false;
    }
    if (!size_mul(cap, sizeof *l->data, &bytes)) return false;
    int32_t *grown = realloc(l->data, bytes);
    if (!grown) return false;
    l->data = grown;
    l->cap = cap;
    return true;
}

bool id_list_push(struct id_list *l, int32_t id) {
    if (!id_list_reserve(l, 1)) return false;
    l->data[l->len++] = id;
    return true;
}

void id_list_free(struct id_list *l) {
    free(l->data);
    *l = (struct id_list){0};
}

void tokenizer_free(struct tokenizer *t) {
    if (!t) return;
    free(t->arena);
    free(t->tokens);
    free(t->added);
    bpe_table_free(&t->merges);
    splitter_free(t->splitter);
    free(t);
}

/* One call of tokenizer_encode. */
struct encoder {
    const struct tokenizer *t;
    struct bpe_scratch bpe;
    struct buf normal; /* a run in NFC */
    struct id_list *out;
    lily_err *err;
};

/* One piece of the split: its bytes become byte tokens, written straight into the result (there
 * are never more tokens than bytes), and are merged there. */
static int encode_piece(void *arg, const char *piece, size_t n) {
    struct encoder *e = arg;
    if (!id_list_reserve(e->out, n)) return ERR_NOMEM(e->err, "token ids");
    int32_t *ids = e->out->data + e->out->len;
    for (size_t i = 0; i < n; i++) ids[i] = e->t->byte_ids[(unsigned char)piece[i]];
    size_t left = bpe_merge_ids(&e->t->merges, &e->bpe, ids, n);
    if (left == 0) return ERR_NOMEM(e->err, "merging a piece of text");
    e->out->len += left;
    return 0;
}

/* A stretch without control tokens. It is normalised as a whole, since characters compose across
 * what the expression would cut. */
static int encode_run(struct encoder *e, const char *text, size_t n) {
    if (n == 0) return 0;
    if (e->t->nfc && !nfc_is_plain(text, n)) {
        buf_clear(&e->normal);
        int rc = nfc_append(text, n, &e->normal, e->err);
        if (rc) return rc;
        text = e->normal.data;
        n = e->normal.len;
    }
    return splitter_run(e->t->splitter, text, n, encode_piece, e, e->err);
}

/* The longest added token that text[n] starts with, or -1. */
static int32_t added_at(const struct tokenizer *t, const char *text, size_t n) {
    if (!t->added_start[(unsigned char)text[0]]) return -1;
    for (size_t i = 0; i < t->n_added; i++) {
        const struct token_bytes *tok = &t->tokens[t->added[i]];
        if (tok->len <= n && memcmp(t->arena + tok->offset, text, tok->len) == 0) {
            return t->added[i];
        }
    }
    return -1;
}

/* Cuts the text at control tokens. A run goes on from one span into the next and through the text
 * between them: spans only say where control tokens count. */
static int encode_spans(struct encoder *e, const char *text, size_t n,
                        const struct text_span *control, size_t n_control) {
    size_t run = 0; /* where the run that is not yet encoded begins */
    for (size_t k = 0; k < n_control; k++) {
        size_t i = control[k].begin;
        while (i < control[k].end) {
            int32_t id = added_at(e->t, text + i, control[k].end - i);
            if (id < 0) {
                i++;
                continue;
            }
            int rc = encode_run(e, text + run, i - run);
            if (rc) return rc;
            if (!id_list_push(e->out, id)) return ERR_NOMEM(e->err, "token ids");
            run = i += e->t->tokens[id].len;
        }
    }
    return encode_run(e, text + run, n - run);
}

int tokenizer_encode(const struct tokenizer *t, const char *text, size_t n,
                     const struct text_span *control, size_t n_control, struct id_list *out,
                     lily_err *err) {
    if (n == 0) text = ""; /* may have been NULL */
    size_t bad = utf8_invalid_at(text, n);
    if (bad < n) {
        return ERR(err, LILY_EINVAL,
                   "text: found byte 0x%02x at offset %zu, expected valid UTF-8; "
                   "convert the text to UTF-8",
                   (unsigned char)text[bad], bad);
    }
    for (size_t k = 0; k < n_control; k++) {
        size_t least = k ? control[k - 1].end : 0;
        if (control[k].begin < least || control[k].end < control[k].begin || control[k].end > n) {
            return ERR(err, LILY_EINVAL,
                       "control span %zu: found %zu..%zu of %zu bytes, expected ordered, disjoint "
                       "ranges inside the text",
                       k, control[k].begin, control[k].end, n);
        }
    }
    struct encoder e = {.t = t, .out = out, .err = err};
    size_t len = out->len;
    int rc = encode_spans(&e, text, n, control, n_control);
    if (rc) out->len = len; /* a call that fails leaves nothing behind */
    bpe_scratch_free(&e.bpe);
    buf_free(&e.normal);
    return rc;
}

int tokenizer_encode_all(const struct tokenizer *t, const char *text, size_t n, bool control,
                         struct id_list *out, lily_err *err) {
    struct text_span all = {0, n};
    return tokenizer_encode(t, text, n, &all, control ? 1 : 0, out, err);
}

/* NULL for ids outside the vocabulary and in its holes. */
static const struct token_bytes *token_of(const struct tokenizer *t, int32_t id) {
    if (id < 0 || id >= t->vocab || t->tokens[id].len == TOKEN_NONE) return NULL;
    return &t->tokens[id];
}

const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *n) {
    const struct token_bytes *tok = token_of(t, id);
    *n = tok ? tok->len : 0;
    return tok ? t->arena + tok->offset : NULL;
}

int32_t tokenizer_vocab(const struct tokenizer *t) {
    return t->vocab;
}

int32_t tokenizer_find(const struct tokenizer *t, const char *added) {
    for (size_t i = 0; i < t->n_added; i++) {
        if (strcmp(t->arena + t->tokens[t->added[i]].offset, added) == 0) return t->added[i];
    }
    return -1;
}

bool tokenizer_is_added(const struct tokenizer *t, int32_t id) {
    const struct token_bytes *tok = token_of(t, id);
    return tok && tok->added;
}

bool tokenizer_is_special(const struct tokenizer *t, int32_t id) {
    const struct token_bytes *tok = token_of(t, id);
    return tok && tok->special;
}
