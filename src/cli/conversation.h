/* A conversation with the model: the turns so far and the session that has read them. */
#ifndef LILY_CLI_CONVERSATION_H
#define LILY_CLI_CONVERSATION_H

#include <jansson.h>
#include <stdbool.h>

#include "cli/printout.h"
#include "cli/sampling_options.h"
#include "lily.h"

struct conversation {
    lily_engine *engine; /* the caller's */
    lily_session *session;
    struct sampling_options *sampling; /* the caller's */
    const char *tools;                 /* the caller's JSON array or NULL */
    char *system;                      /* owned, NULL: none */
    bool thinking;
    json_t *turns; /* messages after the system message, owned */
};

int conversation_start(struct conversation *c, lily_err *err);
void conversation_free(struct conversation *c);

/* Forgets all turns; the system message stays. */
void conversation_reset(struct conversation *c);
/* text "" or NULL: no system message. */
int conversation_set_system(struct conversation *c, const char *text, lily_err *err);

/* Adds a user's or a tool's turn of n bytes; LILY_EINVAL: text is not UTF-8. */
int conversation_add(struct conversation *c, const char *role, const char *text, size_t n,
                     lily_err *err);
size_t conversation_length(const struct conversation *c);
/* Forgets the turns beyond the first n: what a turn that failed had added. */
void conversation_cut(struct conversation *c, size_t n);

/* Lets the model answer what was added and keeps its answer as a turn, also when it was cancelled
 * part-way. Earlier reasoning stays in the prompt, so that the session has read all of it but the
 * new turn. */
int conversation_answer(struct conversation *c, struct printout *answer, lily_result *result,
                        lily_err *err);

/* Writes the messages as a JSON array (what `lily tokenize --chat` reads). */
int conversation_save(const struct conversation *c, const char *path, lily_err *err);

#endif
