/* lily tokenize: text to tokens and back, and the chat template's rendering. */
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/output.h"

struct tokenize_options {
    struct model_options model;
    const char *operand, *file, *decode, *chat, *tools;
    bool control, text, no_think, preserve_thinking;
};

struct tokenize_work {
    lily_engine *engine;
    lily_tokens tokens;
    struct buf input, tools, decoded;
    char *rendered; /* of --chat, malloc'd */
};

/* A piece as one visible word: control characters and bytes that are no UTF-8 are escaped. */
static void print_piece(const char *bytes, size_t n) {
    json_t *whole = json_stringn(bytes, n);
    putchar('"');
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)bytes[i];
        if (c == '\n')
            fputs("\\n", stdout);
        else if (c == '\t')
            fputs("\\t", stdout);
        else if (c == '"' || c == '\\')
            printf("\\%c", c);
        else if (c < 0x20 || c == 0x7f || (c >= 0x80 && !whole))
            printf("\\x%02x", c);
        else
            putchar(c);
    }
    putchar('"');
    json_decref(whole);
}

/* JSON keeps to ids and count: a piece may be half a code point, which JSON cannot hold. */
static int print_tokens(const struct tokenize_options *o, struct tokenize_work *w) {
    if (o->model.json) {
        json_t *ids = json_array();
        for (size_t i = 0; i < w->tokens.n; i++)
            json_array_append_new(ids, json_integer(w->tokens.ids[i]));
        json_t *doc = json_pack("{s:o, s:I}", "ids", ids, "n", (json_int_t)w->tokens.n);
        if (doc && w->rendered && json_object_set_new(doc, "text", json_string(w->rendered))) {
            json_decref(doc);
            doc = NULL;
        }
        return print_json(doc);
    }
    for (size_t i = 0; i < w->tokens.n; i++) {
        size_t n = 0;
        const char *bytes = lily_token_bytes(w->engine, w->tokens.ids[i], &n);
        printf("%7d  ", (int)w->tokens.ids[i]);
        print_piece(bytes, n);
        putchar('\n');
    }
    return EXIT_OK;
}

/* Brackets too: what --json printed can be pasted back. */
static bool is_separator(char c) {
    return c == ',' || c == '[' || c == ']' || c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

/* Ids as --json prints them, or divided by commas or whitespace. */
static int decode(struct tokenize_work *w, const char *ids, lily_err *err) {
    const char *p = ids;
    for (;;) {
        while (is_separator(*p)) p++;
        if (!*p) return LILY_OK;
        char *end;
        long long id = strtoll(p, &end, 10);
        size_t n = 0;
        if (end == p || (*end && !is_separator(*end)))
            return ERR(err, LILY_EINVAL, "--decode: found \"%.20s\", expected token ids", p);
        const char *bytes =
            id >= 0 && id <= INT32_MAX ? lily_token_bytes(w->engine, (int32_t)id, &n) : NULL;
        if (!bytes)
            return ERR(err, LILY_EINVAL, "--decode: found %lld, which is no token of this model",
                       id);
        if (!buf_append(&w->decoded, bytes, n)) return ERR_NOMEM(err, "--decode");
        p = end;
    }
}

/* Bytes as they are, so that decoding inverts tokenising exactly. */
static int print_decoded(const struct tokenize_options *o, const struct tokenize_work *w) {
    if (!o->model.json) {
        fwrite(w->decoded.data, 1, w->decoded.len, stdout);
        return EXIT_OK;
    }
    json_t *text = json_stringn(w->decoded.len ? w->decoded.data : "", w->decoded.len);
    if (!text)
        return fail_text("--decode: found bytes that are not UTF-8, which JSON cannot hold; decode "
                         "without --json");
    return print_json(json_pack("{s:o}", "text", text));
}

/* Text and tokens are asked for separately: the tokens are not those of the text, in which control
 * tokens cannot be told from their spelling. */
static int render(const struct tokenize_options *o, struct tokenize_work *w, lily_err *err) {
    const lily_chat_options chat = {.no_thinking = o->no_think,
                                    .preserve_thinking = o->preserve_thinking};
    int rc = read_json_array(o->chat, &w->input, err);
    if (!rc && o->tools) rc = read_json_array(o->tools, &w->tools, err);
    const char *messages = w->input.len ? w->input.data : "";
    if (!rc) rc = lily_chat_text(w->engine, messages, w->tools.data, &chat, &w->rendered, err);
    if (!rc) rc = lily_chat_prompt(w->engine, messages, w->tools.data, &chat, &w->tokens, err);
    return rc;
}

static int tokenize(const struct tokenize_options *o, struct tokenize_work *w, lily_err *err) {
    enum { SMALL_CONTEXT = 64 }; /* nothing is generated: no memory for it */
    int rc = model_open(&o->model, SMALL_CONTEXT, &w->engine, err);
    if (rc) return rc;
    if (o->decode) return decode(w, o->decode, err);
    if (o->chat) return render(o, w, err);
    if (o->operand)
        rc = read_operand(o->operand, INPUT_LIMIT, &w->input, err);
    else
        rc = read_input(o->file ? o->file : "-", INPUT_LIMIT, &w->input, err);
    if (rc) return rc;
    const char *text = w->input.len ? w->input.data : "";
    return lily_tokenize(w->engine, text, w->input.len, o->control, &w->tokens, err);
}

int cmd_tokenize(int argc, char **argv) {
    struct tokenize_options o = {.model = MODEL_DEFAULTS};
    const struct option options[] = {
        OPT(NAME, "file", 'f', &o.file, "PATH", "the text; -: standard input"),
        OPT_FLAG("control", 0, &o.control, "recognise <|im_start|> and its like in the text"),
        OPT(TEXT, "decode", 0, &o.decode, "IDS", "the other way: print the text of these ids"),
        OPT(NAME, "chat", 0, &o.chat, "FILE",
            "a JSON array of messages, rendered by the chat template"),
        OPT(NAME, "tools", 0, &o.tools, "FILE", "with --chat: JSON array of tools"),
        OPT_FLAG("no-think", 0, &o.no_think, "with --chat: close the think block"),
        OPT_FLAG("preserve-thinking", 0, &o.preserve_thinking,
                 "with --chat: keep the reasoning of earlier turns"),
        OPT_FLAG("text", 0, &o.text, "with --chat: print the rendered text, not its tokens"),
        MODEL_PATH_OPTION(&o.model),
        JSON_OPTION(&o.model.json),
    };
    const struct usage usage = {
        .command = "tokenize",
        .operands = "[TEXT]",
        .summary = "text to tokens and back",
        .about = "The text is the operand (-: standard input), --file, or standard input. One "
                 "token a line, id and bytes; --json gives {\"ids\": [...], \"n\": N}.",
        .example = "lily tokenize \"Hello, world\"",
        USAGE_OPTIONS(options),
        .max_operands = 1,
    };
    int status = options_parse(&usage, argc, argv, &o.operand, NULL);
    if (status != OPTIONS_GO_ON) return status;
    if ((o.operand != NULL) + (o.file != NULL) + (o.decode != NULL) + (o.chat != NULL) > 1)
        return usage_error("tokenize", "give one of TEXT, --file, --decode and --chat");
    if (!o.chat && (o.tools || o.no_think || o.preserve_thinking || o.text))
        return usage_error("tokenize", "--tools, --text, --no-think and --preserve-thinking: found "
                                       "without --chat, expected beside it");
    if (o.control && (o.chat || o.decode))
        return usage_error("tokenize", "--control: found with --%s, expected with a text",
                           o.chat ? "chat" : "decode");
    /* No signals are caught: nothing is half-written, and the default action ends a wait for input.
     */
    struct tokenize_work w = {0};
    lily_err err = {0};
    int rc = tokenize(&o, &w, &err);
    if (rc)
        status = fail(&err);
    else if (o.decode)
        status = print_decoded(&o, &w);
    else if (o.chat && o.text && !o.model.json)
        status = (fputs(w.rendered, stdout), EXIT_OK);
    else
        status = print_tokens(&o, &w);
    free(w.rendered);
    buf_free(&w.input);
    buf_free(&w.tools);
    buf_free(&w.decoded);
    lily_tokens_free(&w.tokens);
    lily_engine_close(w.engine);
    return status;
}
