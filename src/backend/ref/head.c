/* Both ends of the model (docs/model.md): a token's row of the embedding, neither scaled nor
 * given a position, and the scores of all tokens. The two matrices are not tied. */
#include "backend/ref/ref.h"

void ref_embed(const struct weights *w, int32_t token, float *h) {
    mat_row(&w->embed, token, h);
}

/* logits[V] = lm_head normed[H]; rows from vocab_used on are padding that no one may sample. */
void ref_logits(const struct weights *w, const float *normed, float *logits) {
    mat_vec(&w->lm_head, normed, logits);
}

bool ref_finite(const float *x, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) return false;
    }
    return true;
}
