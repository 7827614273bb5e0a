/* The first byte chooses: the rest is a tokenizer.json, or a text to encode. Encoded text must come
 * back byte for byte from its tokens (in NFC, as encoding it once more shows), control tokens must
 * appear only where they are allowed, and text that is not UTF-8 must be refused. */
#include <stdio.h>

#include "../text/tiny_tokenizer.h"
#include "text/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "%s\n", what);
    abort();
}

static struct tokenizer *fixed(void) {
    static const char *const longer[] = {"ab", "bc", "abc", "  ", "    ", "\xcc\x81", "\n\n", "'s"};
    static const size_t len[] = {2, 2, 3, 2, 4, 2, 2, 2};
    lily_err err;
    json_t *merges = json_array();
    for (size_t i = 0; i < 8; i++) {
        struct buf left = {0}, right = {0};
        size_t half = (len[i] + (i != 2)) / 2; /* "abc" is a + bc */
        tiny_spell(&left, longer[i], half);
        tiny_spell(&right, longer[i] + half, len[i] - half);
        json_array_append_new(merges, json_pack("[ss]", left.data, right.data));
        buf_free(&left);
        buf_free(&right);
    }
    struct tokenizer *t = tiny_load(tiny_json(longer, len, 8, merges), &err);
    require(t != NULL, err.msg);
    return t;
}

static void decode(const struct tokenizer *t, const struct id_list *ids, struct buf *out) {
    for (size_t i = 0; i < ids->len; i++) {
        size_t n;
        const char *bytes = tokenizer_bytes(t, ids->data[i], &n);
        require(bytes && buf_append(out, bytes, n), "an id without a token");
    }
}

static void encode(const struct tokenizer *t, const char *text, size_t n, bool control) {
    struct id_list ids = {0}, again = {0};
    struct buf back = {0};
    lily_err err;
    bool valid = utf8_invalid_at(text, n) == n;
    int rc = tokenizer_encode_all(t, text, n, control, &ids, &err);
    require((rc == 0) == valid, "UTF-8 and only UTF-8 is encoded");
    if (rc == 0 && !control) {
        decode(t, &ids, &back);
        require(utf8_invalid_at(back.data ? back.data : "", back.len) == back.len, "not UTF-8");
        require(tokenizer_encode_all(t, back.data, back.len, false, &again, &err) == 0, err.msg);
        require(again.len == ids.len &&
                    (!ids.len || !memcmp(again.data, ids.data, ids.len * sizeof *ids.data)),
                "the text of the tokens has other tokens");
        for (size_t i = 0; i < ids.len; i++)
            require(!tokenizer_is_added(t, ids.data[i]), "a control token outside every span");
    }
    buf_free(&back);
    id_list_free(&ids);
    id_list_free(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static struct tokenizer *t;
    if (!t) t = fixed();
    if (size == 0) return 0;
    const char *rest = (const char *)data + 1;
    if (data[0] % 4 == 0) {
        struct tokenizer *loaded = NULL;
        lily_err err;
        if (tokenizer_load(rest, size - 1, &loaded, &err) == 0) {
            encode(loaded, "a b\n1", 5, true);
            tokenizer_free(loaded);
        }
    } else {
        encode(t, rest, size - 1, data[0] % 4 == 1);
    }
    return 0;
}
