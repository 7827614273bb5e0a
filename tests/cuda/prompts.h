/* Prompts for greedy text: the stand-in's held-out tasks as a client would ask them, passages of
 * the project's own documents, and pseudo-random tokens. */
#ifndef TESTS_CUDA_PROMPTS_H
#define TESTS_CUDA_PROMPTS_H

#include "check.h"

struct prompt {
    int32_t *ids;
    int32_t n;
    const char *kind; /* static */
};
struct prompts {
    struct prompt *list; /* [n], owned, as are the ids */
    int32_t n;
    int32_t end; /* the token that ends an answer; -1: none */
};

/* n prompts of at most `longest` tokens; texts only where the checkpoint has a tokenizer, and from
 * files below the present folder. The last tenth and whatever texts do not fill is random. */
struct prompts prompts_of(const struct bench_model *b, int32_t n, int32_t longest);
void prompts_free(struct prompts *p);

#endif
