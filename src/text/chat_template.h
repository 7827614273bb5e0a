/* The model's chat template, rendered in C byte for byte as the published chat_template.jinja does.
 * Because the renderer knows which bytes it wrote itself and which came from a message, control
 * tokens typed by a user, a tool or a tool description stay text. */
#ifndef LILY_TEXT_CHAT_TEMPLATE_H
#define LILY_TEXT_CHAT_TEMPLATE_H

#include <jansson.h>

#include "base/buf.h"
#include "text/tokenizer.h"

/* sha256 of the chat_template.jinja this renderer equals. */
extern const char chat_template_sha256[];

struct chat_options {
    bool enable_thinking;   /* false: the generation prompt holds an empty, closed think block */
    bool preserve_thinking; /* keep the reasoning of earlier turns */
    bool add_generation_prompt;
    bool continue_final; /* leave the last message, an assistant's, open for the model to go on
                          * with, its think block closed; there is no generation prompt then.
                          * LILY_EINVAL when chat_ends_open is false */
};

/* Whether the last message is an assistant's without tool calls: what the client wants continued
 * (see continue_final; the template itself would end that turn and begin another). */
bool chat_ends_open(const json_t *messages);

/* Whether a prompt rendered with these options ends inside a think block. */
bool chat_ends_in_think(const struct chat_options *options);

struct chat_text {
    struct buf text;         /* the rendered prompt */
    struct text_span *spans; /* [n_spans] the renderer's own bytes, in order, disjoint */
    size_t n_spans, cap_spans;
};
void chat_text_free(struct chat_text *t);

/* messages: array of {role, content, reasoning_content?, tool_calls?}; tools: array or NULL.
 * What the Jinja template refuses is LILY_EINVAL with the template's reason and the message index.
 * Strict: client quirks (developer role, late system turns, string arguments) are mended before. */
int chat_render(const json_t *messages, const json_t *tools, const struct chat_options *options,
                struct chat_text *out, lily_err *err);

/* Mends what real clients send, in a deep copy that the caller owns: `developer` becomes system,
 * several leading system turns are merged and later ones folded in place as marked user text,
 * tool-call arguments given as a JSON string are parsed (bad ones: LILY_EINVAL naming the message),
 * `reasoning` is taken as reasoning_content, and so on. Each is listed in docs/clients.md. */
int chat_mend(const json_t *messages, json_t **out, lily_err *err);

#endif
