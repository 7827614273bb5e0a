/* Text in and out: the tokenizer and the chat template behind lily.h. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "text/chat_template.h"
#include "text/json_text.h"

void lily_tokens_free(lily_tokens *t) {
    free(t->ids);
    *t = (lily_tokens){0};
}

static int need_tokenizer(const lily_engine *e, lily_err *err) {
    if (e->tokenizer) return 0;
    return ERR(err, LILY_EMODEL,
               "tokenizer.json: absent from the checkpoint; text needs it, token ids do not");
}

int lily_tokenize(const lily_engine *e, const char *text, size_t n, bool control, lily_tokens *out,
                  lily_err *err) {
    struct id_list ids = {0};
    *out = (lily_tokens){0};
    int rc = need_tokenizer(e, err);
    if (!rc) rc = tokenizer_encode_all(e->tokenizer, text, n, control, &ids, err);
    if (rc) {
        id_list_free(&ids);
        return rc;
    }
    *out = (lily_tokens){ids.data, ids.len};
    return 0;
}

const char *lily_token_bytes(const lily_engine *e, int32_t id, size_t *n) {
    *n = 0;
    return e->tokenizer && id >= 0 ? tokenizer_bytes(e->tokenizer, id, n) : NULL;
}

static int parse(const char *what, const char *text, json_t **out, lily_err *err) {
    int rc = json_text_load(what, text, strlen(text), out, err);
    if (rc || json_is_array(*out)) return rc;
    json_decref(*out);
    *out = NULL;
    return ERR(err, LILY_EINVAL, "%s: found no array, expected an array of %s", what, what);
}

/* Renders into out, which the caller frees in any case. */
static int render(const char *messages, const char *tools, const lily_chat_options *options,
                  struct chat_text *out, lily_err *err) {
    static const lily_chat_options none;
    if (!options) options = &none;
    struct chat_options how = {
        .enable_thinking = !options->no_thinking,
        .preserve_thinking = options->preserve_thinking,
        .add_generation_prompt = !options->no_generation_prompt,
    };
    json_t *given = NULL, *mended = NULL, *tool_list = NULL;
    int rc = parse("messages", messages, &given, err);
    if (!rc && tools) rc = parse("tools", tools, &tool_list, err);
    if (!rc) rc = chat_mend(given, &mended, err);
    /* A conversation that ends with the assistant's words is to be continued, not answered. */
    if (!rc) how.continue_final = how.add_generation_prompt && chat_ends_open(mended);
    if (!rc) rc = chat_render(mended, tool_list, &how, out, err);
    json_decref(given);
    json_decref(mended);
    json_decref(tool_list);
    return rc;
}

int lily_chat_prompt(const lily_engine *e, const char *messages, const char *tools,
                     const lily_chat_options *options, lily_tokens *out, lily_err *err) {
    struct chat_text chat = {0};
    struct id_list ids = {0};
    *out = (lily_tokens){0};
    int rc = need_tokenizer(e, err);
    if (!rc) rc = render(messages, tools, options, &chat, err);
    if (!rc) {
        rc = tokenizer_encode(e->tokenizer, chat.text.data, chat.text.len, chat.spans, chat.n_spans,
                              &ids, err);
    }
    chat_text_free(&chat);
    if (rc) {
        id_list_free(&ids);
        return rc;
    }
    *out = (lily_tokens){ids.data, ids.len};
    return 0;
}

int lily_chat_text(const lily_engine *e, const char *messages, const char *tools,
                   const lily_chat_options *options, char **out, lily_err *err) {
    (void)e;
    struct chat_text chat = {0};
    *out = NULL;
    int rc = render(messages, tools, options, &chat, err);
    if (!rc && !(*out = buf_take(&chat.text))) rc = ERR_NOMEM(err, "chat text");
    chat_text_free(&chat);
    return rc;
}
