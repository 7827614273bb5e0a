#include "cli/conversation.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "cli/interrupt.h"

int conversation_start(struct conversation *c, lily_err *err) {
    c->turns = json_array();
    if (!c->turns) return ERR_NOMEM(err, "conversation");
    return lily_session_new(c->engine, 0, &c->session, err);
}

void conversation_free(struct conversation *c) {
    lily_session_free(c->session);
    json_decref(c->turns);
    free(c->system);
}

/* The session is emptied too: nothing of the old talk should stay in memory. */
void conversation_reset(struct conversation *c) {
    json_array_clear(c->turns);
    lily_session_reset(c->session);
}

int conversation_set_system(struct conversation *c, const char *text, lily_err *err) {
    char *copy = NULL;
    /* Asked here, where the text comes from, and not of every turn that follows. */
    json_t *valid = json_string(text ? text : "");
    json_decref(valid);
    if (!valid)
        return ERR(err, LILY_EINVAL,
                   "system message: found bytes that are not UTF-8, expected UTF-8 text");
    if (text && *text && !(copy = strdup(text))) return ERR_NOMEM(err, "system message");
    free(c->system);
    c->system = copy;
    return LILY_OK;
}

/* json_pack tells bytes that are not UTF-8 from lack of memory no better than this; the former is
 * what happens. */
int conversation_add(struct conversation *c, const char *role, const char *text, size_t n,
                     lily_err *err) {
    json_t *turn = json_pack("{s:s, s:s%}", "role", role, "content", text, n);
    if (!turn || json_array_append_new(c->turns, turn))
        return ERR(err, LILY_EINVAL, "input: found bytes that are not UTF-8, expected UTF-8 text");
    return LILY_OK;
}

size_t conversation_length(const struct conversation *c) {
    return json_array_size(c->turns);
}

void conversation_cut(struct conversation *c, size_t n) {
    while (json_array_size(c->turns) > n)
        json_array_remove(c->turns, json_array_size(c->turns) - 1);
}

/* The messages as text, malloc'd; NULL: out of memory. */
static char *messages_text(const struct conversation *c, size_t flags) {
    json_t *all = json_array();
    char *text = NULL;
    bool ok = all != NULL;
    if (ok && c->system)
        ok = !json_array_append_new(
            all, json_pack("{s:s, s:s}", "role", "system", "content", c->system));
    if (ok) ok = !json_array_extend(all, c->turns);
    if (ok) text = json_dumps(all, flags);
    json_decref(all);
    return text;
}

/* preserve_thinking: a turn rendered otherwise than it was generated would have to be read again.
 */
static int render(const struct conversation *c, lily_tokens *prompt, lily_err *err) {
    char *messages = messages_text(c, 0);
    if (!messages) return ERR_NOMEM(err, "conversation");
    const lily_chat_options options = {.no_thinking = !c->thinking, .preserve_thinking = true};
    int rc = lily_chat_prompt(c->engine, messages, c->tools, &options, prompt, err);
    free(messages);
    return rc;
}

int conversation_answer(struct conversation *c, struct printout *answer, lily_result *result,
                        lily_err *err) {
    lily_sampling sampling;
    lily_tokens prompt = {0};
    sampling_resolve(c->sampling, c->engine, c->thinking, &sampling);
    int rc = render(c, &prompt, err);
    if (rc) return rc;
    lily_request request = {
        .prompt = prompt.ids,
        .n_prompt = prompt.n,
        .max_tokens = c->sampling->max_tokens,
        .sampling = &sampling,
        .stops = c->sampling->stops.items,
        .n_stops = c->sampling->stops.n,
        .tools = c->tools,
        .in_think = c->thinking,
        .on_event = printout_event,
        .arg = answer,
    };
    interrupt_session(c->session);
    rc = lily_generate(c->session, &request, result, err);
    interrupt_session(NULL);
    printout_end(answer);
    lily_tokens_free(&prompt);
    if (rc) return rc;
    json_t *turn = answer->no_memory ? NULL : printout_message(answer);
    if (!turn || json_array_append_new(c->turns, turn)) return ERR_NOMEM(err, "answer");
    return LILY_OK;
}

/* Never over an existing file: there is no --force at the prompt, and what was typed by mistake
 * would be gone. */
int conversation_save(const struct conversation *c, const char *path, lily_err *err) {
    struct file_writer *file;
    if (file_exists(path))
        return ERR(err, LILY_EINVAL, "%s: exists already; give another name", path);
    char *text = messages_text(c, JSON_INDENT(2));
    if (!text) return ERR_NOMEM(err, path);
    int rc = file_writer_open(path, &file, err);
    if (!rc) {
        rc = file_writer_write(file, text, strlen(text), err);
        if (!rc) rc = file_writer_write(file, "\n", 1, err);
        if (rc)
            file_writer_abort(file);
        else
            rc = file_writer_commit(file, err);
    }
    free(text);
    return rc;
}
