#include "prompts.h"

#include <dirent.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

static const char TASKS[] = "tests/standin/heldout.jsonl", DOCUMENTS[] = "docs";

/* Takes over ids; a prompt that is empty or too long is left out. */
static void add(struct prompts *p, int32_t room, int32_t longest, struct id_list *ids,
                const char *kind) {
    if (p->n < room && ids->len > 0 && ids->len <= (size_t)longest) {
        p->list[p->n++] = (struct prompt){ids->data, (int32_t)ids->len, kind};
        return;
    }
    id_list_free(ids);
}

/* One line of the tasks: messages, thinking, perhaps tools. */
static int task_ids(const struct tokenizer *t, const json_t *task, struct id_list *ids,
                    lily_err *err) {
    struct chat_options how = {.enable_thinking = json_is_true(json_object_get(task, "thinking")),
                               .add_generation_prompt = true};
    struct chat_text chat = {0};
    json_t *mended = NULL;
    int rc = chat_mend(json_object_get(task, "messages"), &mended, err);
    if (!rc) rc = chat_render(mended, json_object_get(task, "tools"), &how, &chat, err);
    if (!rc) {
        rc = tokenizer_encode(t, chat.text.data, chat.text.len, chat.spans, chat.n_spans, ids, err);
    }
    json_decref(mended);
    chat_text_free(&chat);
    return rc;
}

static void add_tasks(struct prompts *p, int32_t room, int32_t longest, const struct tokenizer *t) {
    FILE *f = fopen(TASKS, "r");
    char *line = NULL;
    size_t size = 0;
    lily_err err;
    if (!f) {
        printf("  skipped: %s is not below this folder\n", TASKS);
        return;
    }
    while (p->n < room && getline(&line, &size, f) > 0) {
        struct id_list ids = {0};
        json_t *task = json_loads(line, 0, NULL);
        int rc = task ? task_ids(t, task, &ids, &err) : LILY_EINVAL;
        if (rc) note_error("held-out task", rc, task ? &err : &(lily_err){.msg = "no JSON"});
        add(p, room, longest, &ids, "task");
        json_decref(task);
    }
    free(line);
    fclose(f);
}

/* Paragraphs of at least 60 bytes, cut at a space behind 40 to 240 bytes. */
static void add_passages(struct prompts *p, int32_t room, int32_t longest,
                         const struct tokenizer *t, char *text) {
    for (char *at = strtok(text, "\n"); at && p->n < room; at = strtok(NULL, "\n")) {
        struct id_list ids = {0};
        lily_err err;
        size_t n = strlen(at), most = 40 + (size_t)p->n * 37 % 200;
        if (n < 60) continue;
        if (n > most) n = most;
        while (n > 1 && at[n - 1] != ' ') n--;
        int rc = tokenizer_encode_all(t, at, n, false, &ids, &err);
        if (rc) note_error("passage", rc, &err);
        add(p, room, longest, &ids, "passage");
    }
}

static int markdown(const struct dirent *e) {
    size_t n = strlen(e->d_name);
    return n > 3 && strcmp(e->d_name + n - 3, ".md") == 0;
}

static void add_documents(struct prompts *p, int32_t room, int32_t longest,
                          const struct tokenizer *t) {
    struct dirent **names = NULL;
    int count = scandir(DOCUMENTS, &names, markdown, alphasort);
    if (count < 0) printf("  skipped: %s is not below this folder\n", DOCUMENTS);
    for (int i = 0; i < count; i++) {
        char path[300], *text = NULL;
        snprintf(path, sizeof path, "%s/%s", DOCUMENTS, names[i]->d_name);
        FILE *f = fopen(path, "r");
        size_t size = 0;
        if (f && getdelim(&text, &size, 0, f) > 0) add_passages(p, room, longest, t, text);
        if (f) fclose(f);
        free(text);
        free(names[i]);
    }
    free(names);
}

struct prompts prompts_of(const struct bench_model *b, int32_t n, int32_t longest) {
    struct prompts p = {.list = calloc((size_t)n, sizeof *p.list), .end = -1};
    struct tokenizer *t = NULL;
    size_t size = 0;
    lily_err err;
    const char *json = ckpt_text(b->ckpt, "tokenizer.json", &size);
    if (json && b->trained) {
        int rc = tokenizer_load(json, size, &t, &err);
        if (rc) note_error("tokenizer", rc, &err);
    }
    if (t) {
        int32_t room = n - n / 10;
        p.end = tokenizer_find(t, "<|im_end|>");
        add_tasks(&p, room * 6 / 10, longest, t);
        add_documents(&p, room, longest, t);
        tokenizer_free(t);
    }
    for (int32_t i = 0; p.n < n; i++) {
        struct prompt *r = &p.list[p.n++];
        *r = (struct prompt){.n = 4 + i % 40, .kind = "random"};
        r->ids = malloc((size_t)r->n * sizeof *r->ids);
        for (int32_t k = 0; k < r->n; k++) r->ids[k] = token_at(7919 * i + k, b->w->vocab_used);
    }
    return p;
}

void prompts_free(struct prompts *p) {
    for (int32_t i = 0; i < p->n; i++) free(p->list[i].ids);
    free(p->list);
}
