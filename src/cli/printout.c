#include "cli/printout.h"

#include <string.h>
#include <unistd.h>

#include "cli/interrupt.h"
#include "cli/output.h"

static const char dim[] = "\033[2m";
static const char bright[] = "\033[1m";
static const char normal[] = "\033[0m";

void printout_start(struct printout *a, bool quiet) {
    *a = (struct printout){.quiet = quiet, .watched = isatty(STDOUT_FILENO) != 0};
}

void printout_free(struct printout *a) {
    buf_free(&a->content);
    buf_free(&a->reasoning);
    buf_free(&a->name);
    buf_free(&a->args);
    json_decref(a->calls);
}

/* A person's terminal is protected from control characters; a file gets the bytes as they are. */
static void print_text(struct printout *a, const char *text, size_t n) {
    if (n == 0) return;
    if (a->watched)
        write_printable(stdout, text, n);
    else
        fwrite(text, 1, n, stdout);
    a->line_open = text[n - 1] != '\n';
}

/* Parts are set apart by an empty line where a person reads, by a line end elsewhere. */
static void enter_part(struct printout *a, enum answer_part part) {
    if (a->part == part) return;
    if (a->part == ANSWER_REASONING) fputs(normal, stdout);
    if (a->part != ANSWER_NOTHING) {
        if (a->line_open) putchar('\n');
        if (a->watched) putchar('\n');
        a->line_open = false;
    }
    if (part == ANSWER_REASONING) fputs(dim, stdout);
    a->part = part;
}

/* Every piece is flushed: it should be seen, or refused by a reader that left, at once. */
static void print_piece(struct printout *a, enum answer_part part, const char *text, size_t n) {
    if (a->quiet || (part == ANSWER_REASONING && !a->watched)) return;
    work_bar_end(&a->bar);
    if (a->part != part) {
        /* The blank lines that the template puts between the parts are ours to print. */
        while (part != ANSWER_TOOL && n > 0 && *text == '\n') text++, n--;
        if (n == 0) return;
        enter_part(a, part);
    }
    print_text(a, text, n);
    if (!output_flush()) a->output_failed = true;
}

/* Kept although printed: a chat needs the turn, --json the whole. Lack of memory ends the answer
 * at the next event. */
static void keep(struct printout *a, struct buf *b, const char *text, size_t n) {
    if (!buf_append(b, text, n)) a->no_memory = true;
}

/* One finished call becomes an item of calls. */
static void keep_call(struct printout *a) {
    const char *text = a->args.len ? a->args.data : "{}";
    json_t *arguments = json_loads(text, JSON_DECODE_ANY, NULL);
    /* Arguments that are not JSON are kept as the text they are. */
    if (!arguments) arguments = json_string(text);
    json_t *call =
        json_pack("{s:s, s:o}", "name", a->name.len ? a->name.data : "", "arguments", arguments);
    if (!a->calls) a->calls = json_array();
    if (!call || json_array_append_new(a->calls, call)) a->no_memory = true;
}

static void print_call_end(struct printout *a) {
    print_piece(a, ANSWER_TOOL, "\n", 1);
}

/* The name at once: arguments may take a while. Bright, since it is no text of the answer. */
static void print_call_begin(struct printout *a, const lily_event *event) {
    if (a->quiet) return;
    enter_part(a, ANSWER_TOOL);
    if (a->watched) fputs(bright, stdout);
    print_piece(a, ANSWER_TOOL, event->text, event->n);
    if (a->watched) fputs(normal, stdout);
    print_piece(a, ANSWER_TOOL, " ", 1);
}

static void take_event(struct printout *a, const lily_event *event) {
    switch (event->kind) {
    case LILY_EVENT_PREFILL:
        a->read = event->done;
        work_bar_update(&a->bar, "prompt", "tok", (uint64_t)event->done, (uint64_t)event->total);
        break;
    case LILY_EVENT_REASONING:
        keep(a, &a->reasoning, event->text, event->n);
        print_piece(a, ANSWER_REASONING, event->text, event->n);
        break;
    case LILY_EVENT_CONTENT:
        keep(a, &a->content, event->text, event->n);
        print_piece(a, ANSWER_CONTENT, event->text, event->n);
        break;
    case LILY_EVENT_TOOL_BEGIN:
        buf_clear(&a->name);
        buf_clear(&a->args);
        keep(a, &a->name, event->text, event->n);
        print_call_begin(a, event);
        break;
    case LILY_EVENT_TOOL_ARGS:
        keep(a, &a->args, event->text, event->n);
        print_piece(a, ANSWER_TOOL, event->text, event->n);
        break;
    case LILY_EVENT_TOOL_END:
        keep_call(a);
        print_call_end(a);
        break;
    }
}

/* Every event asks whether to go on, the prompt's chunks included: this is what bounds a Ctrl-C. A
 * pipe that nobody empties is another matter than a terminal: there the signal ends the write. */
int printout_event(void *arg, const lily_event *event) {
    struct printout *a = arg;
    if (a->watched) interrupt_hold();
    take_event(a, event);
    if (a->watched) interrupt_release();
    return interrupted() || a->output_failed || a->no_memory;
}

void printout_end(struct printout *a) {
    work_bar_end(&a->bar);
    if (a->quiet) return;
    if (a->watched) interrupt_hold();
    if (a->part == ANSWER_REASONING) fputs(normal, stdout);
    /* A shell prompt or the statistics should not stand at the end of the answer's last line. */
    if (a->line_open) putchar('\n');
    a->line_open = false;
    a->part = ANSWER_NOTHING;
    output_flush();
    if (a->watched) interrupt_release();
}

/* Tool calls as OpenAI's messages have them, arguments as an object (the template wants one). */
static json_t *message_calls(const struct printout *a) {
    json_t *out = json_array();
    size_t i;
    json_t *call;
    json_array_foreach(a->calls, i, call) {
        json_t *item = json_pack("{s:s, s:O}", "type", "function", "function", call);
        if (json_array_append_new(out, item)) {
            json_decref(out);
            return NULL;
        }
    }
    return out;
}

/* The splitter gives whole code points only, so this fails for lack of memory alone. */
static json_t *text_json(const struct buf *b) {
    return json_stringn(b->len ? b->data : "", b->len);
}

json_t *printout_message(const struct printout *a) {
    json_t *m = json_pack("{s:s, s:o, s:o}", "role", "assistant", "content", text_json(&a->content),
                          "reasoning_content", text_json(&a->reasoning));
    if (m && a->calls && json_object_set_new(m, "tool_calls", message_calls(a))) {
        json_decref(m);
        return NULL;
    }
    return m;
}

/* Of the tokens that were read, which the result does not tell from those that were to be. */
static double prompt_rate(const struct printout *a, const lily_result *r) {
    return r->prefill_seconds > 0 ? (a->read - r->cached_tokens) / r->prefill_seconds : 0;
}

/* The first token falls out of the prompt: a decode step stands behind each of the others. */
static double decode_rate(const lily_result *r) {
    bool measured = r->decode_seconds > 0 && r->output_tokens > 1;
    return measured ? (r->output_tokens - 1) / r->decode_seconds : 0;
}

void print_speed(FILE *to, const struct printout *a, const lily_result *r) {
    fputs("prompt ", to);
    if (a->read < r->prompt_tokens) fprintf(to, "%d of ", (int)a->read);
    fprintf(to, "%d tokens (%d cached) %.1f tok/s, answer %d tokens %.1f tok/s",
            (int)r->prompt_tokens, (int)r->cached_tokens, prompt_rate(a, r), (int)r->output_tokens,
            decode_rate(r));
}

void print_statistics(FILE *to, const struct printout *a, const lily_engine *e,
                      const lily_result *r) {
    char memory[BYTES_ROOM];
    lily_engine_info info;
    lily_engine_get_info(e, &info);
    print_speed(to, a, r);
    fprintf(to, " | %s, %s | memory %s\n", info.backend, info.device,
            format_bytes(memory, sizeof memory, (double)peak_memory()));
}

static const char *finish_name(enum lily_finish finish) {
    switch (finish) {
    case LILY_FINISH_STOP:
        return "stop";
    case LILY_FINISH_LENGTH:
        return "length";
    case LILY_FINISH_TOOLS:
        return "tool_calls";
    case LILY_FINISH_CANCELLED:
        return "cancelled";
    }
    return "unknown";
}

json_t *printout_json(const struct printout *a, const lily_engine *e, const lily_result *r) {
    json_t *calls = a->calls ? json_incref(a->calls) : json_array();
    char seed[24]; /* all 64 bits, which a JSON number does not hold everywhere */
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)r->seed);
    return json_pack("{s:o, s:o, s:o, s:s, s:i, s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:s, s:o}",
                     "text", text_json(&a->content), "reasoning", text_json(&a->reasoning),
                     "tool_calls", calls, "finish", finish_name(r->finish), "prompt_tokens",
                     (int)r->prompt_tokens, "cached_tokens", (int)r->cached_tokens, "output_tokens",
                     (int)r->output_tokens, "reasoning_tokens", (int)r->reasoning_tokens,
                     "prefill_seconds", r->prefill_seconds, "decode_seconds", r->decode_seconds,
                     "prefill_tok_s", prompt_rate(a, r), "decode_tok_s", decode_rate(r), "seed",
                     seed, "engine", engine_json(e));
}
