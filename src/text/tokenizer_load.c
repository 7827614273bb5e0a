/* tokenizer.json into a struct tokenizer. Whatever the file asks for that this program does not do
 * is refused here: a tokenizer that is nearly right gives fluent nonsense. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "text/tokenizer_internal.h"
#include "text/utf8.h"

#define MAX_ID                                                                                     \
    4000000 /* far above any vocabulary: bounds what a damaged file makes us allocate              \
             */

/* GPT-2's byte alphabet: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 up.
 * Files spell tokens in it. */
struct byte_alphabet {
    int16_t byte_of[0x144]; /* code point to byte, -1: none */
};

static void byte_alphabet_init(struct byte_alphabet *a) {
    int next = 0x100;
    for (int i = 0; i < 0x144; i++) a->byte_of[i] = -1;
    for (int b = 0; b < 256; b++) {
        bool printable = (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad);
        a->byte_of[printable ? b : next++] = (int16_t)b;
    }
}

/* The bytes a vocabulary key stands for; a key with characters outside the alphabet stands for its
 * own spelling (as the library's ByteLevel decoder has it). Returns the length. out: [n]. */
static size_t key_bytes(const struct byte_alphabet *a, const char *key, size_t n, char *out) {
    size_t count = 0;
    for (size_t i = 0, len; i < n; i += len) {
        uint32_t c = utf8_decode(key + i, &len);
        if (c >= 0x144 || a->byte_of[c] < 0) {
            memcpy(out, key, n);
            return n;
        }
        out[count++] = (char)a->byte_of[c];
    }
    return count;
}

struct loader {
    struct tokenizer *t;
    struct buf arena;
    struct byte_alphabet alphabet;
    lily_err *err;
};

/* The file is readable but asks for something else than this program does. */
static int bad(struct loader *l, const char *what, const char *found, const char *expected) {
    return ERR(l->err, LILY_EMODEL,
               "tokenizer.json: %s: found %s, expected %s; use the tokenizer.json of the model",
               what, found, expected);
}

static const char *text_of(const json_t *v) {
    return json_is_string(v) ? json_string_value(v) : v ? "another JSON type" : "nothing";
}

static bool is_absent(const json_t *v) {
    return !v || json_is_null(v);
}

static int expect_text(struct loader *l, const json_t *object, const char *key, const char *want) {
    const json_t *v = json_object_get(object, key);
    if (json_is_string(v) && strcmp(json_string_value(v), want) == 0) return 0;
    return bad(l, key, text_of(v), want);
}

/* Options that change ids and that this program does not implement must be off. */
static int expect_off(struct loader *l, const json_t *object, const char *const *keys) {
    for (; *keys; keys++) {
        const json_t *v = json_object_get(object, *keys);
        bool off =
            is_absent(v) || json_is_false(v) || (json_is_string(v) && !*json_string_value(v));
        if (!off) return bad(l, *keys, text_of(v), "it to be off (null, false or empty)");
    }
    return 0;
}

/* Makes room for id in the table. */
static int grow_tokens(struct loader *l, json_int_t id) {
    struct tokenizer *t = l->t;
    if (id < 0 || id > MAX_ID) {
        return ERR(l->err, LILY_EFORMAT,
                   "tokenizer.json: token id: found %lld, expected 0 to %d; the file is damaged",
                   (long long)id, MAX_ID);
    }
    if (id < t->vocab) return 0;
    int32_t vocab = (int32_t)id + 1;
    struct token_bytes *tokens = realloc(t->tokens, (size_t)vocab * sizeof *tokens);
    if (!tokens) return ERR_NOMEM(l->err, "vocabulary");
    for (int32_t i = t->vocab; i < vocab; i++) {
        tokens[i] = (struct token_bytes){.len = TOKEN_NONE};
    }
    t->tokens = tokens;
    t->vocab = vocab;
    return 0;
}

/* Vocabulary and merges are independent lists: some tokens are the result of no merge, so neither
 * can be derived from the other. */
static int load_vocab(struct loader *l, const json_t *vocab) {
    if (!json_is_object(vocab) || json_object_size(vocab) == 0) {
        return bad(l, "model.vocab", "no object with tokens", "token to id");
    }
    const char *key;
    json_t *value;
    json_int_t highest = 0;
    json_object_foreach((json_t *)vocab, key, value) {
        if (!json_is_integer(value))
            return bad(l, "model.vocab", "an id that is no integer", "ids");
        if (json_integer_value(value) > highest) highest = json_integer_value(value);
    }
    int rc = grow_tokens(l, highest);
    if (rc) return rc;

    for (int b = 0; b < 256; b++) l->t->byte_ids[b] = -1;
    json_object_foreach((json_t *)vocab, key, value) {
        size_t n = strlen(key);
        if ((rc = grow_tokens(l, json_integer_value(value)))) return rc;
        struct token_bytes *tok = &l->t->tokens[json_integer_value(value)];
        if (tok->len != TOKEN_NONE) {
            return ERR(l->err, LILY_EFORMAT,
                       "tokenizer.json: id %lld: found two tokens, expected one; the file is "
                       "damaged",
                       (long long)json_integer_value(value));
        }
        if (!buf_reserve(&l->arena, n + 1)) return ERR_NOMEM(l->err, "vocabulary");
        tok->offset = l->arena.len;
        tok->len = (uint32_t)key_bytes(&l->alphabet, key, n, l->arena.data + l->arena.len);
        if (tok->len == 1) {
            l->t->byte_ids[(unsigned char)l->arena.data[tok->offset]] =
                (int32_t)json_integer_value(value);
        }
        l->arena.len += tok->len;
        l->arena.data[l->arena.len++] = 0;
    }
    for (int b = 0; b < 256; b++) {
        if (l->t->byte_ids[b] < 0) {
            return bad(l, "model.vocab", "no token for some byte", "all 256 single-byte tokens");
        }
    }
    return 0;
}

/* The two parts of a merge: ["a","b"], or "a b" in older files. false: neither. */
static bool merge_parts(const json_t *merge, const char **a, size_t *na, const char **b,
                        size_t *nb) {
    if (json_is_string(merge)) {
        const char *text = json_string_value(merge), *space = strchr(text, ' ');
        if (!space || strchr(space + 1, ' ')) return false;
        *a = text;
        *na = (size_t)(space - text);
        *b = space + 1;
        *nb = strlen(*b);
        return true;
    }
    const json_t *left = json_array_get(merge, 0), *right = json_array_get(merge, 1);
    if (json_array_size(merge) != 2 || !json_is_string(left) || !json_is_string(right)) {
        return false;
    }
    *a = json_string_value(left);
    *na = json_string_length(left);
    *b = json_string_value(right);
    *nb = json_string_length(right);
    return true;
}

/* The rank of a merge is its place in the list. */
static int load_merges(struct loader *l, const json_t *vocab, const json_t *merges) {
    if (!json_is_array(merges)) return bad(l, "model.merges", "no array", "an array of pairs");
    int rc = bpe_table_init(&l->t->merges, json_array_size(merges), l->err);
    if (rc) return rc;
    struct buf whole = {0};
    size_t i;
    json_t *merge;
    json_array_foreach((json_t *)merges, i, merge) {
        const char *a, *b;
        size_t na, nb;
        const json_t *left = NULL, *right = NULL, *joined = NULL;
        if (merge_parts(merge, &a, &na, &b, &nb)) {
            buf_clear(&whole);
            if (!buf_append(&whole, a, na) || !buf_append(&whole, b, nb)) {
                rc = ERR_NOMEM(l->err, "merges");
                break;
            }
            left = json_object_getn(vocab, a, na);
            right = json_object_getn(vocab, b, nb);
            joined = json_object_getn(vocab, whole.data, whole.len);
        }
        if (!left || !right || !joined) {
            rc = ERR(l->err, LILY_EFORMAT,
                     "tokenizer.json: merge %zu: found no such tokens in the vocabulary, expected "
                     "both parts and their union; the file is damaged",
                     i);
            break;
        }
        bpe_table_set(&l->t->merges, (int32_t)json_integer_value(left),
                      (int32_t)json_integer_value(right), (uint32_t)i,
                      (int32_t)json_integer_value(joined));
    }
    buf_free(&whole);
    return rc;
}

/* Added tokens may lie beyond the vocabulary or name one of its ids; their spelling is their text,
 * not written in the byte alphabet. */
static int load_added_token(struct loader *l, const json_t *entry) {
    static const char *const off[] = {"lstrip", "rstrip", "single_word", "normalized", NULL};
    const json_t *id = json_object_get(entry, "id"), *content = json_object_get(entry, "content");
    struct tokenizer *t = l->t;
    size_t n = json_string_length(content);
    if (!json_is_integer(id) || n == 0 || n >= TOKEN_NONE) {
        return bad(l, "added_tokens", "an entry without id and content", "both");
    }
    int rc = expect_off(l, entry, off);
    if (rc) return rc;
    if ((rc = grow_tokens(l, json_integer_value(id)))) return rc;
    struct token_bytes *tok = &t->tokens[json_integer_value(id)];
    if (tok->added) return bad(l, "added_tokens", "an id twice", "each id once");
    tok->offset = l->arena.len;
    tok->len = (uint32_t)n;
    tok->added = 1;
    tok->special = json_is_true(json_object_get(entry, "special"));
    if (!buf_append(&l->arena, json_string_value(content), n + 1)) {
        return ERR_NOMEM(l->err, "added tokens");
    }
    t->added_start[(unsigned char)json_string_value(content)[0]] = true;

    size_t at = t->n_added++; /* keep the list sorted: longest first */
    while (at > 0 && t->tokens[t->added[at - 1]].len < tok->len) {
        t->added[at] = t->added[at - 1];
        at--;
    }
    t->added[at] = (int32_t)json_integer_value(id);
    return 0;
}

static int load_added(struct loader *l, const json_t *added) {
    if (is_absent(added)) return 0;
    size_t n = json_array_size(added), i;
    json_t *entry;
    l->t->added = calloc(n + 1, sizeof *l->t->added);
    if (!l->t->added) return ERR_NOMEM(l->err, "added tokens");
    json_array_foreach((json_t *)added, i, entry) {
        int rc = load_added_token(l, entry);
        if (rc) return rc;
    }
    return 0;
}

/* Sequence [Split by an expression, isolated; ByteLevel without an expression of its own]. */
static int load_split(struct loader *l, const json_t *pre) {
    static const char *const split_off[] = {"invert", NULL};
    static const char *const byte_off[] = {"add_prefix_space", NULL};
    const json_t *steps = json_object_get(pre, "pretokenizers");
    const json_t *split = json_array_get(steps, 0), *bytes = json_array_get(steps, 1);
    const json_t *expression = json_object_get(json_object_get(split, "pattern"), "Regex");
    int rc = expect_text(l, pre, "type", "Sequence");
    if (rc) return rc;
    if (json_array_size(steps) != 2) {
        return bad(l, "pre_tokenizer", "another number of steps", "Split and ByteLevel");
    }
    if ((rc = expect_text(l, split, "type", "Split"))) return rc;
    if ((rc = expect_text(l, split, "behavior", "Isolated"))) return rc;
    if ((rc = expect_off(l, split, split_off))) return rc;
    if ((rc = expect_text(l, bytes, "type", "ByteLevel"))) return rc;
    if ((rc = expect_off(l, bytes, byte_off))) return rc;
    if (!json_is_false(json_object_get(bytes, "use_regex"))) {
        return bad(l, "pre_tokenizer ByteLevel use_regex", "true", "false");
    }
    if (!json_is_string(expression)) {
        return bad(l, "pre_tokenizer Split", "no Regex", "a split expression");
    }
    return splitter_new(json_string_value(expression), json_string_length(expression),
                        &l->t->splitter, l->err);
}

/* Added tokens come last: their spelling replaces the vocabulary's where both name an id. */
static int load_root(struct loader *l, const json_t *root) {
    static const char *const model_off[] = {"dropout",
                                            "unk_token",
                                            "continuing_subword_prefix",
                                            "end_of_word_suffix",
                                            "byte_fallback",
                                            "ignore_merges",
                                            NULL};
    const json_t *model = json_object_get(root, "model");
    const json_t *normalizer = json_object_get(root, "normalizer");
    const json_t *vocab = json_object_get(model, "vocab");
    int rc = expect_text(l, model, "type", "BPE");
    if (rc) return rc;
    if ((rc = expect_off(l, model, model_off))) return rc;
    if (!is_absent(normalizer)) {
        if ((rc = expect_text(l, normalizer, "type", "NFC"))) return rc;
        l->t->nfc = true;
    }
    if ((rc = load_split(l, json_object_get(root, "pre_tokenizer")))) return rc;
    if ((rc = load_vocab(l, vocab))) return rc;
    if ((rc = load_merges(l, vocab, json_object_get(model, "merges")))) return rc;
    return load_added(l, json_object_get(root, "added_tokens"));
}

int tokenizer_load(const char *json, size_t size, struct tokenizer **out, lily_err *err) {
    struct loader l = {.err = err};
    json_error_t why;
    int rc = 0;
    json_t *root = json_loadb(json, size, 0, &why);
    if (!root) {
        return ERR(err, LILY_EFORMAT, "tokenizer.json: line %d: %s; expected JSON: fetch it again",
                   why.line, why.text);
    }
    l.t = calloc(1, sizeof *l.t);
    byte_alphabet_init(&l.alphabet);
    rc = l.t ? load_root(&l, root) : ERR_NOMEM(err, "tokenizer");
    json_decref(root);
    if (rc) {
        tokenizer_free(l.t);
        buf_free(&l.arena);
        return rc;
    }
    l.t->arena = l.arena.data; /* the buffer's memory is now the tokenizer's */
    *out = l.t;
    return 0;
}
