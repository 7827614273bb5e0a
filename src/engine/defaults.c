#include "engine/defaults.h"

#include <jansson.h>
#include <string.h>

#include "ckpt/json.h"
#include "engine/sampler.h"

static const lily_sampling neutral = {
    .temperature = 1, .top_p = 1, .repetition_penalty = 1, .random_seed = true};

/* The card's tables of one shape, and what its published generation_config.json says. */
struct card {
    const char *shape;
    lily_sampling thinking, no_thinking, published;
};
static const struct card cards[] = {{
    .shape = "qwen3.6-35b-a3b",
    .thinking = {.temperature = 1,
                 .top_k = 20,
                 .top_p = 0.95f,
                 .presence_penalty = 1.5f,
                 .repetition_penalty = 1,
                 .random_seed = true},
    .no_thinking = {.temperature = 0.7f,
                    .top_k = 20,
                    .top_p = 0.8f,
                    .presence_penalty = 1.5f,
                    .repetition_penalty = 1,
                    .random_seed = true},
    .published = {.temperature = 1, .top_k = 20, .top_p = 0.95f, .repetition_penalty = 1},
}};

static const char file_name[] = "generation_config.json";

static int bad_value(const char *key, const char *expected, lily_err *err) {
    return ERR(err, LILY_EFORMAT, "%s: %s: found another value, expected %s; mend or remove it",
               file_name, key, expected);
}

/* ---- sampling -------------------------------------------------------------------------------- */

/* A field of the file replaces the table's value when it differs from the published file's: then
 * somebody meant it. (The published file holds the thinking values only, and would otherwise undo
 * the table of the mode without thinking.) */
static int read_float(const json_t *file, const char *key, float published, float *thinking,
                      float *no_thinking, lily_err *err) {
    const json_t *v = json_object_get(file, key);
    if (!v || json_is_null(v)) return 0;
    if (!json_is_number(v)) return bad_value(key, "a number", err);
    float value = (float)json_number_value(v);
    if (value != published) *thinking = *no_thinking = value;
    return 0;
}

static int read_sampling(const json_t *file, const lily_sampling *published, struct defaults *d,
                         lily_err *err) {
    lily_sampling *a = &d->thinking, *b = &d->no_thinking;
    int rc;
#define READ(field)                                                                                \
    if ((rc = read_float(file, #field, published->field, &a->field, &b->field, err))) return rc
    READ(temperature);
    READ(top_p);
    READ(min_p);
    READ(presence_penalty);
    READ(frequency_penalty);
    READ(repetition_penalty);
#undef READ
    const json_t *top_k = json_object_get(file, "top_k");
    if (top_k && !json_is_null(top_k)) {
        json_int_t k = json_integer_value(top_k);
        if (!json_is_integer(top_k) || k < 0 || k > INT32_MAX) {
            return bad_value("top_k", "a whole number from 0 on", err);
        }
        if (k != published->top_k) a->top_k = b->top_k = (int32_t)k;
    }
    const json_t *sample = json_object_get(file, "do_sample");
    if (sample && !json_is_null(sample) && !json_is_boolean(sample)) {
        return bad_value("do_sample", "true or false", err);
    }
    if (json_is_false(sample)) a->temperature = b->temperature = 0;
    return 0;
}

/* ---- end ids --------------------------------------------------------------------------------- */

static int add_stop(struct defaults *d, json_int_t id, int32_t vocab, const char *where,
                    lily_err *err) {
    if (id < 0 || id >= vocab) {
        return ERR(
            err, LILY_EFORMAT,
            "%s: eos_token_id: found %lld, expected an id below the vocabulary's %d; use the "
            "file of this checkpoint",
            where, (long long)id, vocab);
    }
    for (int32_t i = 0; i < d->n_stops; i++) {
        if (d->stops[i] == id) return 0;
    }
    if (d->n_stops == DEFAULTS_STOPS) {
        return ERR(err, LILY_EFORMAT,
                   "%s: eos_token_id: found more than %d ids, expected fewer; remove some", where,
                   DEFAULTS_STOPS);
    }
    d->stops[d->n_stops++] = (int32_t)id;
    return 0;
}

/* eos_token_id is absent, null, an id, or an array of ids. */
static int read_stops(const json_t *object, const char *where, int32_t vocab, struct defaults *d,
                      lily_err *err) {
    const json_t *v = json_object_get(object, "eos_token_id");
    if (!v || json_is_null(v)) return 0;
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_integer(id)) {
            return ERR(err, LILY_EFORMAT,
                       "%s: eos_token_id: found another type, expected an id or an array of ids; "
                       "use the file of this checkpoint",
                       where);
        }
        int rc = add_stop(d, json_integer_value(id), vocab, where, err);
        if (rc) return rc;
    }
    return 0;
}

/* *out: the parsed object, the caller's to release; NULL when the file is absent. */
static int parse(const struct text_file *file, const char *name, json_t **out, lily_err *err) {
    *out = NULL;
    return file->text ? json_parse_object(name, file->text, file->size, out, err) : 0;
}

int defaults_read(const char *shape, const struct text_file *generation_config,
                  const struct text_file *config, const struct tokenizer *tokenizer, int32_t vocab,
                  struct defaults *out, lily_err *err) {
    static const char *const names[] = {"<|im_end|>", "<|endoftext|>"};
    lily_sampling published = neutral;
    json_t *generation = NULL, *model = NULL;
    int rc;
    *out = (struct defaults){.thinking = neutral, .no_thinking = neutral};
    for (size_t i = 0; i < sizeof cards / sizeof *cards; i++) {
        if (strcmp(cards[i].shape, shape) != 0) continue;
        out->thinking = cards[i].thinking;
        out->no_thinking = cards[i].no_thinking;
        published = cards[i].published;
    }
    if ((rc = parse(generation_config, file_name, &generation, err)) ||
        (rc = parse(config, "config.json", &model, err)) ||
        (rc = read_stops(generation, file_name, vocab, out, err)) ||
        (rc = read_stops(model, "config.json", vocab, out, err)) ||
        (rc = read_stops(json_object_get(model, "text_config"), "config.json", vocab, out, err)) ||
        (rc = read_sampling(generation, &published, out, err))) {
        goto out;
    }
    for (size_t i = 0; tokenizer && i < sizeof names / sizeof *names; i++) {
        int32_t id = tokenizer_find(tokenizer, names[i]);
        if (id >= 0 && (rc = add_stop(out, id, vocab, "tokenizer.json", err))) goto out;
    }
    lily_err why;
    if (sampler_check(&out->thinking, vocab, &why) ||
        sampler_check(&out->no_thinking, vocab, &why)) {
        rc = ERR(err, LILY_EFORMAT, "%s: %.400s; mend or remove it", file_name, why.msg);
    }
out:
    json_decref(generation);
    json_decref(model);
    return rc;
}
