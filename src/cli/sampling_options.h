/* The options that say how tokens are drawn. */
#ifndef LILY_CLI_SAMPLING_OPTIONS_H
#define LILY_CLI_SAMPLING_OPTIONS_H

#include "cli/options.h"
#include "lily.h"

struct sampling_options {
    float temperature, top_p, min_p, presence, frequency, repetition;
    int32_t top_k, max_tokens;
    uint64_t seed;
    struct text_list stops, biases; /* biases: "ID=B" */
    bool has_temperature, has_top_k, has_top_p, has_min_p, has_presence, has_frequency,
        has_repetition, has_seed;
    int32_t bias_ids[OPTION_LIST_MAX]; /* what sampling_check made of biases */
    float bias[OPTION_LIST_MAX];
};

/* Entries of a command's option table; o points to a struct sampling_options. */
#define SAMPLING_OPTIONS(o)                                                                        \
    OPT_GROUP("sampling (defaults: the checkpoint's, for thinking or not)"),                       \
        OPT_GIVEN(REAL, "temperature", &(o)->temperature, "T", 0, 100, &(o)->has_temperature,      \
                  "0: always the likeliest token"),                                                \
        OPT_GIVEN(INT, "top-k", &(o)->top_k, "K", 0, 1 << 20, &(o)->has_top_k,                     \
                  "only the K likeliest; 0: off"),                                                 \
        OPT_GIVEN(REAL, "top-p", &(o)->top_p, "P", 0, 1, &(o)->has_top_p,                          \
                  "the likeliest whose mass reaches P; 1: off"),                                   \
        OPT_GIVEN(REAL, "min-p", &(o)->min_p, "P", 0, 1, &(o)->has_min_p,                          \
                  "at least P times the likeliest; 0: off"),                                       \
        OPT_GIVEN(REAL, "presence-penalty", &(o)->presence, "X", -2, 2, &(o)->has_presence,        \
                  "against tokens already in the answer"),                                         \
        OPT_GIVEN(REAL, "frequency-penalty", &(o)->frequency, "X", -2, 2, &(o)->has_frequency,     \
                  "the same, by their count"),                                                     \
        OPT_GIVEN(REAL, "repetition-penalty", &(o)->repetition, "X", 0.01, 100,                    \
                  &(o)->has_repetition, "divides their logits; 1: off"),                           \
        OPT(TEXTS, "logit-bias", 0, &(o)->biases, "ID=B",                                          \
            "adds B to the logit of token ID; may be repeated"),                                   \
        OPT_GIVEN(U64, "seed", &(o)->seed, "N", 0, 0, &(o)->has_seed,                              \
                  "same seed, same text; without it a new one is drawn"),                          \
        OPT_RANGE(INT, "max-tokens", &(o)->max_tokens, "N", 0, 1 << 24,                            \
                  "most tokens of the answer; 0: until the context ends"),                         \
        OPT(TEXTS, "stop", 0, &(o)->stops, "TEXT", "end the answer before TEXT; may be repeated")

/* What the table cannot check, before a model is loaded: OPTIONS_GO_ON, or EXIT_USAGE after the
 * message. */
int sampling_check(struct sampling_options *o, const char *command);
/* The checkpoint's defaults with the given options over them; out points into o. */
void sampling_resolve(const struct sampling_options *o, const lily_engine *e, bool thinking,
                      lily_sampling *out);

#endif
