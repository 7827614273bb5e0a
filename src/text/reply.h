/* From sampled tokens to what a client sees: detokenising, stop strings, the split into reasoning
 * and content, and tool calls parsed as they arrive. Fed one token at a time; the result does not
 * depend on how the bytes were split into tokens.
 *
 * Only the control tokens <think>, </think>, <tool_call> and </tool_call> divide a reply; the same
 * letters spelled with other tokens are text. What is not exactly the model's text:
 * - Reasoning is trimmed of whitespace at both ends; newlines after </think> are dropped, and so is
 *   whitespace before a tool call and between calls. All other whitespace is kept.
 * - One <think> at the very beginning of the reasoning is dropped (the prompt holds it already),
 * and so is every </think> outside a think block. A <think> in the answer opens a block.
 * - A tool call inside the think block is a call; the block goes on after it.
 * - Special tokens (<|im_start|> and its like) are dropped; other added tokens are text.
 * - A <tool_call> that no "<function=NAME>" follows is text, with all that comes after it.
 * - In an argument's value control tokens are text, except that </tool_call> ends the call.
 * - Of an argument given twice the first value holds. */
#ifndef LILY_TEXT_REPLY_H
#define LILY_TEXT_REPLY_H

#include <jansson.h>
#include <stdbool.h>

#include "base/err.h"
#include "text/tokenizer.h"

enum reply_event_kind {
    REPLY_REASONING,  /* text[n]: a piece of the think block, whole code points */
    REPLY_CONTENT,    /* text[n]: a piece of the answer */
    REPLY_TOOL_BEGIN, /* text[n]: the function's name; call: index of the call in this reply */
    REPLY_TOOL_ARGS,  /* text[n]: more bytes of the arguments' JSON object */
    REPLY_TOOL_END,   /* the call is complete: all its ARGS together are one JSON object */
};

struct reply_event {
    enum reply_event_kind kind;
    int call;
    const char *text; /* valid during the callback; zero-terminated */
    size_t n;
};

/* Nonzero stops the feeding and is returned by reply_push. */
typedef int (*reply_fn)(void *arg, const struct reply_event *event);

struct reply_options {
    const struct tokenizer *tokenizer; /* outlives the reply */
    bool in_think;                     /* the prompt ended inside a think block */
    const json_t *tools;      /* NULL, or the request's tools: arguments are typed by their schema.
                               * Outlives the reply */
    const char *const *stops; /* [n_stops] stop strings, looked for in content only */
    size_t n_stops;
    bool no_calls; /* nobody expects tool calls: what looks like one is text */
};

struct reply;
int reply_new(const struct reply_options *options, reply_fn fn, void *arg, struct reply **out,
              lily_err *err);
void reply_free(struct reply *r);

/* Feeds one sampled token (not the end-of-turn token). *stopped is set when a stop string was
 * completed: its bytes and all after it are dropped. */
int reply_push(struct reply *r, int32_t id, bool *stopped, lily_err *err);
/* The end: what was held back is emitted through the same path; an unfinished tool call is closed
 * as valid JSON (its text so far), a malformed one becomes content. */
int reply_finish(struct reply *r, lily_err *err);

int reply_tool_calls(const struct reply *r);       /* completed calls */
bool reply_in_think(const struct reply *r);        /* the next token is inside the think block */
int reply_reasoning_tokens(const struct reply *r); /* tokens of the think block, tags excluded */

#endif
