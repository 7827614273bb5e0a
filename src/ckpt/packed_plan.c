/* Where everything lies in a packed file. */
#include "ckpt/packed.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t align_up(uint64_t n, uint64_t to) {
    return (n + to - 1) / to * to;
}

static uint64_t elements(const struct packed_plan *p, const struct packed_tensor *t) {
    return (uint64_t)tensor_rows(t->role, p->shape) * (uint64_t)tensor_cols(t->role, p->shape);
}

uint64_t packed_code_bytes(const struct packed_plan *p, const struct packed_tensor *t) {
    return elements(p, t) * (uint64_t)t->bits / 8;
}

uint64_t packed_scale_bytes(const struct packed_plan *p, const struct packed_tensor *t) {
    return t->bits == 32 ? 0 : elements(p, t) / (uint64_t)p->shape->group * 2;
}

static bool is_expert(const struct packed_tensor *t) {
    return t->role->kind == KIND_EXPERTS;
}

int packed_plan_make(const struct shape *s, int32_t layers,
                     int32_t (*bits)(const void *arg, const struct tensor_role *r, int32_t layer),
                     const void *arg, struct packed_plan *out, lily_err *err) {
    *out = (struct packed_plan){.shape = s, .layers = layers};
    size_t most = (size_t)(layers + 1) * (size_t)tensor_role_count;
    out->tensors = calloc(most, sizeof *out->tensors);
    if (!out->tensors) return ERR_NOMEM(err, "packed file");
    struct tensor_walk walk;
    tensor_walk_start(&walk, s, layers);
    while (tensor_walk_next(&walk)) {
        struct packed_tensor *t = &out->tensors[out->n_tensors++];
        bool matrix = walk.role->kind == KIND_MATRIX || walk.role->kind == KIND_EXPERTS;
        *t = (struct packed_tensor){.role = walk.role,
                                    .layer = walk.layer,
                                    .bits = matrix ? bits(arg, walk.role, walk.layer) : 32};
        out->weight_bytes += (packed_code_bytes(out, t) + 2 * packed_scale_bytes(out, t)) *
                             (uint64_t)tensor_items(walk.role, s);
    }
    /* Texts, embedding, head, and for each layer one section and its runs of experts. */
    size_t runs = ((size_t)s->experts + PACKED_RUN - 1) / PACKED_RUN;
    out->sections = calloc(3 + (size_t)layers * (1 + runs), sizeof *out->sections);
    if (out->sections) return 0;
    packed_plan_free(out);
    return ERR_NOMEM(err, "packed file");
}

void packed_plan_free(struct packed_plan *p) {
    free(p->tensors);
    free(p->sections);
    *p = (struct packed_plan){0};
}

static struct packed_section *begin_section(struct packed_plan *p, uint64_t *at, int first) {
    *at = align_up(*at, PACKED_ALIGN);
    struct packed_section *s = &p->sections[p->n_sections++];
    *s = (struct packed_section){.offset = *at, .first = first, .items = 1};
    return s;
}

/* Codes, scales and biases of one item from *at on. */
static void place_item(const struct packed_plan *p, struct packed_tensor *t, uint64_t *at) {
    *at = align_up(*at, PACKED_PART);
    t->offset = *at;
    *at += packed_code_bytes(p, t);
    if (t->bits == 32) return;
    t->scales = align_up(*at, PACKED_PART);
    t->biases = align_up(t->scales + packed_scale_bytes(p, t), PACKED_PART);
    *at = t->biases + packed_scale_bytes(p, t);
}

/* The experts of one layer: gate, up and down of the first, of the second, ... at one distance. */
static void place_experts(struct packed_plan *p, int first, int count, uint64_t *at) {
    *at = align_up(*at, PACKED_ALIGN);
    const uint64_t begin = *at;
    uint64_t end = begin;
    for (int i = 0; i < count; i++) place_item(p, &p->tensors[first + i], &end);
    uint64_t stride = align_up(end - begin, PACKED_ALIGN);
    for (int i = 0; i < count; i++) p->tensors[first + i].stride = stride;
    int32_t experts = p->shape->experts;
    for (int32_t e = 0; e < experts; e += PACKED_RUN) {
        struct packed_section *s = begin_section(p, at, first);
        s->count = count;
        s->experts = true;
        s->item = e;
        s->items = experts - e < PACKED_RUN ? experts - e : PACKED_RUN;
        snprintf(s->name, sizeof s->name, "layers.%d.experts.%d", p->tensors[first].layer, e);
        s->bytes = (uint64_t)s->items * stride;
        *at += s->bytes;
    }
}

static void place_texts(struct packed_plan *p, uint64_t *at) {
    struct packed_section *s = begin_section(p, at, 0);
    snprintf(s->name, sizeof s->name, "texts");
    for (int i = 0; i < TEXT_COUNT; i++) {
        if (!p->text[i].present) continue;
        *at = align_up(*at, PACKED_PART);
        p->text[i].offset = *at;
        *at += p->text[i].bytes;
    }
    s->bytes = *at - s->offset;
}

/* The tensors of one layer that are no experts, or those outside the layers that follow each other:
 * one section. */
static void place_dense(struct packed_plan *p, int first, int end, uint64_t *at) {
    struct packed_section *s = begin_section(p, at, first);
    s->count = end - first;
    int32_t layer = p->tensors[first].layer;
    if (layer < 0) {
        snprintf(s->name, sizeof s->name, "%s", first == 0 ? "embedding" : "head");
    } else {
        snprintf(s->name, sizeof s->name, "layers.%d", layer);
    }
    for (int i = first; i < end; i++) {
        if (!is_expert(&p->tensors[i])) place_item(p, &p->tensors[i], at);
    }
    s->bytes = *at - s->offset;
}

void packed_plan_place(struct packed_plan *p, uint64_t header_bytes) {
    uint64_t at = header_bytes;
    p->n_sections = 0;
    place_texts(p, &at);
    for (int first = 0; first < p->n_tensors;) {
        int end = first, experts = -1, n_experts = 0;
        while (end < p->n_tensors && p->tensors[end].layer == p->tensors[first].layer) {
            if (is_expert(&p->tensors[end])) {
                if (experts < 0) experts = end;
                n_experts++;
            }
            end++;
        }
        place_dense(p, first, end, &at);
        if (experts >= 0) place_experts(p, experts, n_experts, &at);
        first = end;
    }
    p->file_bytes = at;
}

static json_t *tensor_entry(const struct packed_plan *p, const struct packed_tensor *t) {
    char name[128];
    tensor_path(t->role, t->layer, name, sizeof name);
    json_int_t rows = tensor_rows(t->role, p->shape), cols = tensor_cols(t->role, p->shape);
    if (t->bits == 32) {
        return json_pack("{s:s, s:i, s:[I, I], s:I}", "name", name, "bits", t->bits, "shape", rows,
                         cols, "offset", (json_int_t)t->offset);
    }
    json_t *e = json_pack("{s:s, s:i, s:[I, I], s:I, s:I, s:I}", "name", name, "bits", t->bits,
                          "shape", rows, cols, "offset", (json_int_t)t->offset, "scales",
                          (json_int_t)t->scales, "biases", (json_int_t)t->biases);
    if (e && is_expert(t)) {
        json_object_set_new(e, "experts", json_integer(p->shape->experts));
        json_object_set_new(e, "stride", json_integer((json_int_t)t->stride));
    }
    return e;
}

json_t *packed_directory(const struct packed_plan *p, int32_t vocab_used, const char *source) {
    json_t *texts = json_array(), *sections = json_array(), *tensors = json_array();
    bool ok = texts && sections && tensors;
    for (int i = 0; ok && i < TEXT_COUNT; i++) {
        if (!p->text[i].present) continue;
        json_t *e =
            json_pack("{s:s, s:I, s:I}", "name", text_file_name((enum text_file)i), "offset",
                      (json_int_t)p->text[i].offset, "bytes", (json_int_t)p->text[i].bytes);
        ok = json_array_append_new(texts, e) == 0;
    }
    for (int i = 0; ok && i < p->n_sections; i++) {
        const struct packed_section *s = &p->sections[i];
        json_t *e =
            json_pack("{s:s, s:I, s:I, s:s}", "name", s->name, "offset", (json_int_t)s->offset,
                      "bytes", (json_int_t)s->bytes, "sha256", s->sha256);
        ok = json_array_append_new(sections, e) == 0;
    }
    for (int i = 0; ok && i < p->n_tensors; i++) {
        ok = json_array_append_new(tensors, tensor_entry(p, &p->tensors[i])) == 0;
    }
    json_t *root = NULL;
    if (ok) {
        root =
            json_pack("{s:s, s:i, s:i, s:i, s:s, s:O, s:O, s:O}", "shape", p->shape->name, "layers",
                      p->layers, "group", p->shape->group, "vocab_used", vocab_used, "source",
                      source, "texts", texts, "sections", sections, "tensors", tensors);
    }
    json_decref(texts);
    json_decref(sections);
    json_decref(tensors);
    return root;
}
