/* The parts of a tokenizer, shared by its loader and its encoder. */
#ifndef LILY_TEXT_TOKENIZER_INTERNAL_H
#define LILY_TEXT_TOKENIZER_INTERNAL_H

#include "text/bpe.h"
#include "text/pretokenize.h"
#include "text/tokenizer.h"

struct token_bytes {
    size_t offset; /* into tokenizer.arena, where the bytes end with a zero */
    uint32_t len;  /* TOKEN_NONE: no token has this id */
    uint8_t added; /* an added token */
    uint8_t special;
};
#define TOKEN_NONE UINT32_MAX

struct tokenizer {
    char *arena;                /* the bytes of all tokens */
    struct token_bytes *tokens; /* [vocab] by id */
    int32_t vocab;
    int32_t byte_ids[256]; /* the token of each single byte: where merging starts */
    struct bpe_table merges;
    struct splitter *splitter;
    bool nfc;
    int32_t *added; /* [n_added] ids of the added tokens, longest spelling first */
    size_t n_added;
    bool added_start[256]; /* first bytes of added tokens */
};

#endif
