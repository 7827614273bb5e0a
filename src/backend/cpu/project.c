/* The split of tall products over the threads. */
#include "backend/cpu/cpu.h"

void project(struct worker *w, const struct product *products, int32_t count,
             const struct qrows *in, int32_t rows, size_t ldo) {
    const struct kernels *k = w->m->k;
    int32_t units = 0, begin, end;
    for (int32_t i = 0; i < count; i++) units += products[i].mat->rows / ROW_BLOCK;
    cpu_pool_part(units, w->thread, w->threads, &begin, &end);
    for (int32_t i = 0, first = 0; i < count; i++) {
        const struct mat *mat = products[i].mat;
        int32_t mine = mat->rows / ROW_BLOCK;
        int32_t b = begin > first ? begin - first : 0;
        int32_t e = end - first < mine ? end - first : mine;
        first += mine;
        if (b >= e) continue;
        float *out = products[i].out + b * ROW_BLOCK;
        if (rows > 1) {
            k->matmul4(mat, b * ROW_BLOCK, e * ROW_BLOCK, in, NULL, rows, out, ldo);
            continue;
        }
        struct ahead next = {end > first ? products[i + 1].mat : NULL, 0};
        k->matvec4(mat, b * ROW_BLOCK, e * ROW_BLOCK, in, out, next);
    }
}

void project_fetch(struct worker *w, const struct mat *const *mats, int32_t count) {
    int32_t units = 0, begin, end;
    for (int32_t i = 0; i < count; i++) units += mats[i]->rows / ROW_BLOCK;
    cpu_pool_part(units, w->thread, w->threads, &begin, &end);
    for (int32_t i = 0; i < count; i++) {
        int32_t mine = mats[i]->rows / ROW_BLOCK;
        if (begin < mine) {
            w->m->k->fetch((struct ahead){mats[i], begin * ROW_BLOCK});
            return;
        }
        begin -= mine;
    }
}

void layer_fetch(struct worker *w, int32_t layer) {
    const struct weights *weights = w->m->w;
    if (layer == weights->layers) {
        project_fetch(w, (const struct mat *[]){&weights->lm_head}, 1);
    } else if (shape_is_attention(weights->shape, layer)) {
        const struct attention_weights *a = &weights->layer[layer].attention;
        project_fetch(w, (const struct mat *[]){&a->q_proj, &a->k_proj, &a->v_proj}, 3);
    } else {
        const struct deltanet_weights *d = &weights->layer[layer].deltanet;
        project_fetch(w, (const struct mat *[]){&d->in_proj_qkv, &d->in_proj_z}, 2);
    }
}

void project_float(struct worker *w, const struct product *products, int32_t count, const float *in,
                   size_t ldx, int32_t rows, size_t ldo) {
    int32_t units = 0, begin, end;
    for (int32_t i = 0; i < count; i++) units += products[i].mat->rows;
    cpu_pool_part(units, w->thread, w->threads, &begin, &end);
    for (int32_t i = 0, first = 0; i < count; i++) {
        const struct mat *mat = products[i].mat;
        int32_t b = begin > first ? begin - first : 0;
        int32_t e = end - first < mat->rows ? end - first : mat->rows;
        first += mat->rows;
        if (b < e) w->m->k->matmul_float(mat, b, e, in, ldx, rows, products[i].out + b, ldo);
    }
}
