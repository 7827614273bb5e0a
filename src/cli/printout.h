/* An answer on its way out: printed piece by piece, kept for the conversation and for JSON. */
#ifndef LILY_CLI_PRINTOUT_H
#define LILY_CLI_PRINTOUT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include "base/buf.h"
#include "cli/model_options.h"
#include "lily.h"

enum answer_part { ANSWER_NOTHING, ANSWER_REASONING, ANSWER_CONTENT, ANSWER_TOOL };

struct printout {
    bool quiet;   /* print nothing (--json) */
    bool watched; /* standard output is a terminal: reasoning is shown, dimmed */
    /* state */
    enum answer_part part; /* printed last */
    bool line_open;        /* the last printed byte was not a newline */
    bool output_failed;    /* the reader left or the disk is full: the answer was cancelled */
    bool no_memory;
    int32_t read; /* tokens of the prompt, cached ones too: fewer than all after a Ctrl-C */
    struct work_bar bar;
    struct buf content, reasoning, name, args;
    json_t *calls; /* [{"name": ..., "arguments": {...}}], owned */
};

void printout_start(struct printout *a, bool quiet);
void printout_free(struct printout *a);

/* A lily_event_fn; arg is the answer. Cancels when a signal was noted or the output failed. */
int printout_event(void *arg, const lily_event *event);

/* Ends the printed text: colours off, a newline where one is missing. */
void printout_end(struct printout *a);

/* The assistant's turn as a message for lily_chat_prompt; NULL: out of memory. */
json_t *printout_message(const struct printout *a);

/* "prompt 23 tokens (0 cached) 512.3 tok/s, answer 45 tokens 85.1 tok/s"; of a prompt that was not
 * read to its end "prompt 512 of 2300 tokens ..." */
void print_speed(FILE *to, const struct printout *a, const lily_result *r);
/* The same with backend, device and memory, as a line. */
void print_statistics(FILE *to, const struct printout *a, const lily_engine *e,
                      const lily_result *r);

/* The parts of a run's document: text, reasoning, tool_calls, finish, usage, speed. */
json_t *printout_json(const struct printout *a, const lily_engine *e, const lily_result *r);

#endif
