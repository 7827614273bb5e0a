/* Byte-level BPE from a tokenizer.json: NFC, the file's own split expression, merges, added tokens.
 * Ids equal those of the Rust `tokenizers` library. Immutable once loaded: any number of threads.
 */
#ifndef LILY_TEXT_TOKENIZER_H
#define LILY_TEXT_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

struct tokenizer;

/* Growable list of ids; the caller owns it and frees it with id_list_free. */
struct id_list {
    int32_t *data;
    size_t len;
    size_t cap;
};
bool id_list_push(struct id_list *l, int32_t id);
void id_list_free(struct id_list *l);

/* A byte range of a text inside which control tokens are recognised. */
struct text_span {
    size_t begin, end;
};

/* json: the bytes of tokenizer.json (not kept). */
int tokenizer_load(const char *json, size_t size, struct tokenizer **out, lily_err *err);
void tokenizer_free(struct tokenizer *t);

/* Appends the ids of text[n] (UTF-8; invalid bytes are an error naming the offset) to out. Added
 * tokens are recognised only inside the given spans; everywhere else their spelling is plain text.
 * Time is linear in n; scratch memory is allocated and freed inside. */
int tokenizer_encode(const struct tokenizer *t, const char *text, size_t n,
                     const struct text_span *control, size_t n_control, struct id_list *out,
                     lily_err *err);

/* As above with added tokens recognised everywhere (what Hugging Face does) or nowhere. */
int tokenizer_encode_all(const struct tokenizer *t, const char *text, size_t n, bool control,
                         struct id_list *out, lily_err *err);

/* The bytes a token stands for (an added token: its spelling); NULL for ids without a token. Not
 * necessarily whole code points. Owned by t. */
const char *tokenizer_bytes(const struct tokenizer *t, int32_t id, size_t *n);

int32_t tokenizer_vocab(const struct tokenizer *t); /* one more than the highest id */
int32_t tokenizer_find(const struct tokenizer *t, const char *added); /* added token's id or -1 */
bool tokenizer_is_added(const struct tokenizer *t, int32_t id);
bool tokenizer_is_special(const struct tokenizer *t,
                          int32_t id); /* an added token of kind special */

/* Bytes to whole code points: holds back an unfinished UTF-8 sequence, replaces what can never
 * become valid by U+FFFD. Zero-initialise. */
struct utf8_stream {
    unsigned char pending[4];
    int n_pending;
};
struct buf;
/* Appends to out what is complete after n more bytes; false: out of memory. */
bool utf8_stream_push(struct utf8_stream *s, const char *bytes, size_t n, struct buf *out);
/* The end: an unfinished sequence becomes U+FFFD. */
bool utf8_stream_flush(struct utf8_stream *s, struct buf *out);

#endif
