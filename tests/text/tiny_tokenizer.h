/* A tokenizer.json for tests: the 256 bytes, whatever longer tokens a test wants, the real merges
 * of none, and the control tokens. */
#ifndef LILY_TESTS_TINY_TOKENIZER_H
#define LILY_TESTS_TINY_TOKENIZER_H

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "text/tokenizer.h"

/* Control tokens written as one byte in the scripts of tests: TINY_CONTROL[c - 1]. */
static const char *const TINY_CONTROL[] = {"<think>",      "</think>",     "<tool_call>",
                                           "</tool_call>", "<|im_start|>", "<|im_end|>"};
enum { TINY_CONTROLS = 6, TINY_FIRST_CONTROL = 4000 };
#define THINK     "\1"
#define THINK_END "\2"
#define CALL      "\3"
#define CALL_END  "\4"
#define IM_START  "\5"

/* The byte alphabet of byte-level vocabularies, written anew here so that the loader is tested. */
static inline void tiny_spell(struct buf *out, const char *bytes, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned b = (unsigned char)bytes[i], c = b;
        if (b <= 0x20) c = 0x100 + b;
        if (b >= 0x7f && b <= 0xa0) c = 0x121 + b - 0x7f;
        if (b == 0xad) c = 0x143;
        if (c < 0x80)
            buf_printf(out, "%c", (int)c);
        else
            buf_printf(out, "%c%c", (int)(0xc0 | c >> 6), (int)(0x80 | (c & 0x3f)));
    }
}

/* longer: [n] tokens of several bytes, which get the ids 256 + i. merges: a JSON array or NULL. */
static inline json_t *tiny_json(const char *const *longer, const size_t *len, size_t n,
                                json_t *merges) {
    json_t *vocab = json_object(), *added = json_array();
    for (size_t i = 0; i < 256 + n; i++) {
        struct buf key = {0};
        char byte = (char)i;
        tiny_spell(&key, i < 256 ? &byte : longer[i - 256], i < 256 ? 1 : len[i - 256]);
        json_object_set_new(vocab, key.data, json_integer((json_int_t)i));
        buf_free(&key);
    }
    for (int i = 0; i < TINY_CONTROLS; i++) {
        json_array_append_new(added,
                              json_pack("{s:i, s:s, s:b}", "id", TINY_FIRST_CONTROL + i, "content",
                                        TINY_CONTROL[i], "special", TINY_CONTROL[i][1] == '|'));
    }
    static const char expression[] =
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}|"
        " ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    return json_pack("{s:o, s:{s:s}, s:{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, {s:s, s:b, s:b}]}, "
                     "s:{s:s, s:o, s:o}}",
                     "added_tokens", added, "normalizer", "type", "NFC", "pre_tokenizer", "type",
                     "Sequence", "pretokenizers", "type", "Split", "pattern", "Regex", expression,
                     "behavior", "Isolated", "invert", 0, "type", "ByteLevel", "add_prefix_space",
                     0, "use_regex", 0, "model", "type", "BPE", "vocab", vocab, "merges",
                     merges ? merges : json_array());
}

/* Takes over root. NULL: not accepted; see err. */
static inline struct tokenizer *tiny_load(json_t *root, lily_err *err) {
    struct tokenizer *t = NULL;
    char *text = json_dumps(root, JSON_COMPACT);
    if (tokenizer_load(text, strlen(text), &t, err)) t = NULL;
    free(text);
    json_decref(root);
    return t;
}

#endif
