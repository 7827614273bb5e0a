#include "cli/sampling_options.h"

#include <string.h>

#include "base/err.h"

/* "ID=B" or OpenAI's "ID:B". */
static bool parse_bias(const char *text, int32_t *id, float *bias) {
    char number[24];
    int64_t i;
    double b;
    size_t n = strcspn(text, "=:");
    if (n < sizeof number && text[n]) {
        memcpy(number, text, n);
        number[n] = 0;
        if (parse_i64(number, &i) && i >= 0 && i <= INT32_MAX && parse_real(text + n + 1, &b)) {
            *id = (int32_t)i;
            *bias = (float)b;
            return true;
        }
    }
    return false;
}

/* Not an option kind of its own: one command table entry is no reason for one. */
int sampling_check(struct sampling_options *o, const char *command) {
    for (size_t i = 0; i < o->biases.n; i++) {
        const char *text = o->biases.items[i];
        if (!parse_bias(text, &o->bias_ids[i], &o->bias[i]))
            return usage_error(command, "--logit-bias: found \"%s\", expected ID=B such as 42=-5",
                               text);
    }
    return OPTIONS_GO_ON;
}

void sampling_resolve(const struct sampling_options *o, const lily_engine *e, bool thinking,
                      lily_sampling *out) {
    lily_sampling_defaults(e, thinking, out);
    if (o->has_temperature) out->temperature = o->temperature;
    if (o->has_top_k) out->top_k = o->top_k;
    if (o->has_top_p) out->top_p = o->top_p;
    if (o->has_min_p) out->min_p = o->min_p;
    if (o->has_presence) out->presence_penalty = o->presence;
    if (o->has_frequency) out->frequency_penalty = o->frequency;
    if (o->has_repetition) out->repetition_penalty = o->repetition;
    out->random_seed = !o->has_seed;
    out->seed = o->seed;
    out->bias_ids = o->bias_ids;
    out->bias = o->bias;
    out->n_bias = (int32_t)o->biases.n;
}
