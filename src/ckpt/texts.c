#include "ckpt/texts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ckpt/hash.h"
#include "ckpt/json.h"

const char texts_known_template[] =
    "e84f32a23fdda27689f868aa4a1a5621f41133e51a48d7f3efcbea2839574259";

/* Larger than any real one by far, so that a wrong file cannot exhaust memory when parsed. */
#define TEXT_LIMIT ((size_t)256 << 20)

const char *text_file_name(enum text_file file) {
    static const char *const names[TEXT_COUNT] = {
        [TEXT_CONFIG] = "config.json",
        [TEXT_TOKENIZER] = "tokenizer.json",
        [TEXT_TOKENIZER_CONFIG] = "tokenizer_config.json",
        [TEXT_GENERATION_CONFIG] = "generation_config.json",
        [TEXT_CHAT_TEMPLATE] = "chat_template.jinja",
    };
    return names[file];
}

int texts_open(const struct folder *folder, struct texts *out, struct faults *f) {
    *out = (struct texts){0};
    for (int i = 0; i < TEXT_COUNT; i++) {
        const char *name = text_file_name((enum text_file)i);
        lily_err err = {0};
        struct file_map map;
        int rc = folder_map(folder, name, &map, &err);
        bool absent = rc == LILY_ENOENT && !folder_has(folder, name);
        if (absent && i != TEXT_CONFIG) continue;
        if (absent) {
            rc = fault(f, rc,
                       "%s/config.json: found no such file, expected the checkpoint's "
                       "configuration; download it",
                       folder->path);
        } else if (rc != 0) {
            rc = fault_from(f, rc, &err);
        } else if (map.size > TEXT_LIMIT) {
            rc = fault(f, LILY_EFORMAT,
                       "%s/%s: found %zu bytes, expected at most %zu; download it again",
                       folder->path, name, map.size, TEXT_LIMIT);
            file_unmap(&map);
        } else {
            out->file[i].map = map;
            out->file[i].data = map.size ? (const char *)map.data : "";
            out->file[i].size = map.size;
        }
        if (rc != 0) {
            texts_close(out);
            return rc;
        }
    }
    return 0;
}

void texts_close(struct texts *t) {
    for (int i = 0; i < TEXT_COUNT; i++) file_unmap(&t->file[i].map);
    *t = (struct texts){0};
}

static int parse(const struct texts *t, enum text_file file, const char *where, json_t **out,
                 lily_err *err) {
    char what[320];
    snprintf(what, sizeof what, "%.280s/%s", where, text_file_name(file));
    return json_parse_object(what, t->file[file].data, t->file[file].size, out, err);
}

static void raise_to(json_int_t id, json_int_t *highest) {
    if (id > *highest) *highest = id;
}

static json_int_t highest_in_tokenizer(const json_t *root) {
    json_int_t highest = -1;
    const char *name;
    json_t *id;
    size_t i;
    json_object_foreach(json_object_get(json_object_get(root, "model"), "vocab"), name, id) {
        raise_to(json_integer_value(id), &highest);
    }
    json_array_foreach(json_object_get(root, "added_tokens"), i, id) {
        raise_to(json_integer_value(json_object_get(id, "id")), &highest);
    }
    return highest;
}

static json_int_t highest_in_tokenizer_config(const json_t *root) {
    json_int_t highest = -1;
    const char *name;
    json_t *token;
    json_object_foreach(json_object_get(root, "added_tokens_decoder"), name, token) {
        raise_to(strtoll(name, NULL, 10), &highest);
    }
    return highest;
}

int texts_vocab_used(const struct texts *t, const char *where, int32_t vocab, int32_t *out,
                     struct faults *f) {
    *out = vocab;
    if (!t->file[TEXT_TOKENIZER].data) {
        fault_warn(f,
                   "%s: found no tokenizer.json, expected one: every row of the vocabulary counts "
                   "as a token and text cannot be read or written; copy it into the folder",
                   where);
        return 0;
    }
    lily_err err = {0};
    json_t *root = NULL;
    int rc = parse(t, TEXT_TOKENIZER, where, &root, &err);
    if (rc != 0) return fault_from(f, rc, &err);
    json_int_t highest = highest_in_tokenizer(root);
    json_decref(root);
    if (t->file[TEXT_TOKENIZER_CONFIG].data) {
        rc = parse(t, TEXT_TOKENIZER_CONFIG, where, &root, &err);
        if (rc != 0) return fault_from(f, rc, &err);
        raise_to(highest_in_tokenizer_config(root), &highest);
        json_decref(root);
    }
    if (highest < 0 || highest >= vocab) {
        return fault(f, LILY_EFORMAT,
                     "%s/tokenizer.json: found a highest token id of %" JSON_INTEGER_FORMAT
                     ", expected one from 0 to %d; use the tokenizer of this checkpoint",
                     where, highest, vocab - 1);
    }
    *out = (int32_t)highest + 1;
    return 0;
}

/* The template's bytes: *data[*size], or NULL; *root keeps them alive and is the caller's. */
static int find_template(const struct texts *t, const char **data, size_t *size, json_t **root,
                         lily_err *err) {
    *data = t->file[TEXT_CHAT_TEMPLATE].data;
    *size = t->file[TEXT_CHAT_TEMPLATE].size;
    *root = NULL;
    if (*data || !t->file[TEXT_TOKENIZER_CONFIG].data) return 0;
    int rc = parse(t, TEXT_TOKENIZER_CONFIG, "checkpoint", root, err);
    if (rc != 0) return rc;
    const json_t *text = json_object_get(*root, "chat_template");
    *data = json_string_value(text);
    *size = json_string_length(text);
    return 0;
}

int texts_template(const struct texts *t, struct template_info *out, struct faults *f) {
    *out = (struct template_info){0};
    lily_err err = {0};
    const char *data;
    size_t size;
    json_t *root;
    int rc = find_template(t, &data, &size, &root, &err);
    if (rc != 0) return fault_from(f, rc, &err);
    if (data) {
        out->present = true;
        hash_hex(data, size, out->sha256);
        out->known = strcmp(out->sha256, texts_known_template) == 0;
    }
    json_decref(root);
    return 0;
}

static bool contains(const char *data, size_t size, const char *needle) {
    return data && memmem(data, size, needle, strlen(needle)) != NULL;
}

int texts_check_template(const struct texts *t, const char *where, struct faults *f) {
    struct template_info info;
    int rc = texts_template(t, &info, f);
    if (rc != 0) return rc;
    const char *data;
    size_t size;
    json_t *root;
    rc = find_template(t, &data, &size, &root, f->err);
    if (rc != 0) return rc;
    bool other = info.present && !info.known;
    if (other) {
        fault_warn(f,
                   "%s: its chat template (sha256 %s) is not the one this program renders (sha256 "
                   "%s); prompts follow the latter",
                   where, info.sha256, texts_known_template);
    }
    /* Nothing in a config tells the two apart; 3.6 added preserve_thinking to the template. */
    if (strstr(where, "Qwen3.5") || (other && !contains(data, size, "preserve_thinking"))) {
        fault_warn(f,
                   "%s: this looks like Qwen3.5-35B-A3B, which has the shape of Qwen3.6-35B-A3B: "
                   "it runs, with the chat template of the latter",
                   where);
    }
    json_decref(root);
    return 0;
}
