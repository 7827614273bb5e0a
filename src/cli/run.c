/* lily run: one prompt, one streamed answer. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/printout.h"
#include "cli/sampling_options.h"

struct run_options {
    struct model_options model;
    struct sampling_options sampling;
    const char *prompt, *file, *system, *tools;
    bool no_think, raw, stats;
};

/* What is freed at the end, however far the command came. */
struct run_work {
    lily_engine *engine;
    lily_session *session;
    lily_tokens prompt;
    struct buf text, tools;
    struct printout answer;
};

/* Operand, file and standard input in the order that the help promises. */
static int read_prompt(const struct run_options *o, struct buf *out, lily_err *err) {
    if (!o->prompt && !o->file && isatty(STDIN_FILENO))
        return ERR(err, LILY_EINVAL,
                   "prompt: found none, expected one; give it as text, by --file or on "
                   "standard input");
    int rc = LILY_OK;
    if (o->prompt) rc = read_operand(o->prompt, INPUT_LIMIT, out, err);
    if (!rc && o->prompt && o->file && !buf_puts(out, "\n\n")) rc = ERR_NOMEM(err, "prompt");
    if (!rc && (!o->prompt || o->file))
        rc = read_input(o->file ? o->file : "-", INPUT_LIMIT, out, err);
    if (rc) return rc;
    if (out->len == 0) return ERR(err, LILY_EINVAL, "prompt: found nothing, expected text");
    return LILY_OK;
}

/* Whether text ends between <think> and </think>: only --raw prompts need to be asked. */
static bool ends_in_think(const char *text) {
    const char *last = NULL;
    for (const char *p = text; (p = strstr(p, "<think>")); p++) last = p;
    return last && !strstr(last, "</think>");
}

/* jansson takes no text that is not UTF-8, and neither does the tokenizer. */
static int add_message(json_t *messages, const char *role, const char *text, size_t n,
                       lily_err *err) {
    json_t *message = json_pack("{s:s, s:s%}", "role", role, "content", text, n);
    if (message && json_array_append_new(messages, message) == 0) return LILY_OK;
    return ERR(err, LILY_EINVAL, "%s message: found bytes that are not UTF-8, expected UTF-8 text",
               role);
}

/* The prompt's tokens: through the chat template, or as they are. */
static int render_prompt(const struct run_options *o, struct run_work *w, lily_err *err) {
    if (o->raw) return lily_tokenize(w->engine, w->text.data, w->text.len, true, &w->prompt, err);
    const lily_chat_options chat = {.no_thinking = o->no_think};
    json_t *messages = json_array();
    int rc = o->system ? add_message(messages, "system", o->system, strlen(o->system), err) : 0;
    if (!rc) rc = add_message(messages, "user", w->text.data, w->text.len, err);
    char *text = rc ? NULL : json_dumps(messages, 0);
    json_decref(messages);
    if (!rc && !text) rc = ERR_NOMEM(err, "prompt");
    if (!rc) rc = lily_chat_prompt(w->engine, text, w->tools.data, &chat, &w->prompt, err);
    free(text);
    return rc;
}

/* The mode decides about the sampling defaults, and where the answer begins: inside a think block
 * or after it. */
static int generate(struct run_options *o, struct run_work *w, lily_result *result, lily_err *err) {
    lily_sampling sampling;
    const bool thinking = o->raw ? ends_in_think(w->text.data) : !o->no_think;
    sampling_resolve(&o->sampling, w->engine, thinking, &sampling);
    int rc = lily_session_new(w->engine, 0, &w->session, err);
    if (rc) return rc;
    lily_request request = {
        .prompt = w->prompt.ids,
        .n_prompt = w->prompt.n,
        .max_tokens = o->sampling.max_tokens,
        .sampling = &sampling,
        .stops = o->sampling.stops.items,
        .n_stops = o->sampling.stops.n,
        .tools = w->tools.data,
        .in_think = thinking,
        .on_event = printout_event,
        .arg = &w->answer,
    };
    interrupt_session(w->session);
    rc = lily_generate(w->session, &request, result, err);
    interrupt_session(NULL);
    printout_end(&w->answer);
    if (!rc && w->answer.no_memory) rc = ERR_NOMEM(err, "answer");
    return rc;
}

/* What the text alone does not tell: that it ends for lack of room and not because the model had
 * done. Asked for by --max-tokens, an end needs no word unless it left nothing. */
static void tell_cut(const struct run_work *w, const lily_result *r) {
    lily_engine_info info;
    lily_engine_get_info(w->engine, &info);
    const bool full = r->prompt_tokens + r->output_tokens >= info.context;
    const bool none = !w->answer.content.len && json_array_size(w->answer.calls) == 0;
    if (r->finish != LILY_FINISH_LENGTH || (!full && !none)) return;
    if (full)
        fprintf(stderr,
                "lily: answer: it was cut%s where the context of %d tokens ends; give a larger "
                "--ctx%s\n",
                none ? " before it began," : "", (int)info.context, none ? ", or --no-think" : "");
    else
        fputs("lily: answer: the length limit was reached before it began; give more --max-tokens, "
              "or --no-think\n",
              stderr);
}

/* The prompt is read before the model is loaded: a wrong file name should not cost a load. */
static int run(struct run_options *o, struct run_work *w, lily_err *err) {
    lily_result result;
    int rc = read_prompt(o, &w->text, err);
    if (!rc && o->tools) rc = read_json_array(o->tools, &w->tools, err);
    if (!rc) rc = model_open(&o->model, 0, &w->engine, err);
    if (!rc) rc = render_prompt(o, w, err);
    /* A signal that came before there was a session to cancel. */
    if (!rc && interrupted()) rc = ERR(err, LILY_ECANCELED, "interrupted");
    if (!rc) rc = generate(o, w, &result, err);
    if (rc) return fail(err);
    /* An interrupted answer is a result as well; only the exit status tells the difference. */
    if (o->model.json) {
        int status = print_json(printout_json(&w->answer, w->engine, &result));
        if (status) return status;
    }
    if (!o->model.json) tell_cut(w, &result);
    if (o->stats || (isatty(STDERR_FILENO) && !o->model.json))
        print_statistics(stderr, &w->answer, w->engine, &result);
    return interrupted() ? 128 + interrupted() : EXIT_OK;
}

int cmd_run(int argc, char **argv) {
    struct run_options o = {.model = MODEL_DEFAULTS};
    const struct option options[] = {
        OPT(NAME, "file", 'f', &o.file, "PATH",
            "the prompt, or text to follow it; -: standard input"),
        OPT(TEXT, "system", 's', &o.system, "TEXT", "system message"),
        OPT_FLAG("no-think", 0, &o.no_think, "answer at once, without a think block"),
        OPT_FLAG("raw", 0, &o.raw, "no chat template: the prompt's tokens, control tokens too"),
        OPT(NAME, "tools", 0, &o.tools, "FILE", "JSON array of tools the model may call"),
        OPT_FLAG("stats", 0, &o.stats, "speed and memory on stderr even when nobody watches"),
        SAMPLING_OPTIONS(&o.sampling),
        MODEL_OPTIONS(&o.model),
        JSON_OPTION(&o.model.json),
    };
    const struct usage usage = {
        .command = "run",
        .operands = "[PROMPT]",
        .summary = "answer one prompt",
        .about = "The prompt is the operand (-: standard input), --file, or standard input. The "
                 "answer goes to standard output as it is made; on a terminal the reasoning before "
                 "it is shown dimmed, elsewhere only the answer is written. A tool call is a line "
                 "with the tool's name and its arguments as JSON. Ctrl-C ends the answer.",
        .example = "lily run --no-think --seed 1 \"What is 6 times 7?\"",
        USAGE_OPTIONS(options),
        .max_operands = 1,
    };
    int status = options_parse(&usage, argc, argv, &o.prompt, NULL);
    if (status == OPTIONS_GO_ON) status = sampling_check(&o.sampling, "run");
    if (status != OPTIONS_GO_ON) return status;
    /* Refused rather than ignored: who gives them expects them to count. */
    if (o.raw && (o.system || o.no_think))
        return usage_error("run", "--raw: found %s beside it, which needs the chat template",
                           o.system ? "--system" : "--no-think");
    struct run_work w = {0};
    lily_err err = {0};
    /* Signals are noted from here on: reading standard input and loading can take long, too. */
    printout_start(&w.answer, o.model.json);
    interrupt_catch();
    status = run(&o, &w, &err);
    printout_free(&w.answer);
    lily_tokens_free(&w.prompt);
    buf_free(&w.text);
    buf_free(&w.tools);
    lily_session_free(w.session);
    lily_engine_close(w.engine);
    return status;
}
