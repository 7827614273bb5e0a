/* The text between <tool_call> and </tool_call>, parsed as it arrives:
 *     <function=NAME> (<parameter=KEY> VALUE </parameter>)* </function>
 * Only the text; the two control tokens around it are the caller's. */
#ifndef LILY_TEXT_TOOL_CALL_H
#define LILY_TEXT_TOOL_CALL_H

#include <jansson.h>

#include "base/buf.h"

/* What a parser tells its owner. Strings are valid during the call. */
struct tool_call_sink {
    void (*begin)(void *arg, const char *name);
    void (*args)(void *arg, const char *json, size_t n); /* more of the arguments' JSON */
    void (*end)(void *arg);
    void *arg;
};

enum tool_call_status {
    TOOL_CALL_OPEN,   /* goes on */
    TOOL_CALL_CLOSED, /* what was taken in is no call, or nothing after a call: see raw */
};

enum tool_call_state {
    TOOL_CALL_HEAD, /* before and in <function=NAME> */
    TOOL_CALL_BODY, /* between parameters */
    TOOL_CALL_KEY,
    TOOL_CALL_VALUE,
};

/* How far a value's text agrees with the tags that would end it. */
struct tool_call_tail {
    int phase;
    size_t matched; /* bytes of the tag in hand */
};

struct tool_call {
    struct tool_call_sink sink;
    const json_t *tools;
    enum tool_call_state state;
    int calls;       /* begun since tool_call_start */
    struct buf raw;  /* HEAD: all text since the start or since the last call */
    struct buf name; /* the function's, then the key */
    struct buf tag;  /* HEAD, BODY: the beginning of what may be a tag, or all of it */
    struct buf held; /* VALUE: text that may belong to the tags that end it */
    struct tool_call_tail tail;
    struct buf value; /* VALUE: text held until its type can be told */
    json_t *keys;     /* object: the keys this call has had */
    const json_t *parameters;
    unsigned types;
    bool first_byte;  /* of a value: one newline is dropped here */
    bool string_open; /* the value is a string and its bytes flow */
    bool ignored;     /* a key given twice: the first value holds */
    bool failed;      /* out of memory */
};

/* Zero-initialise, set sink and tools, then start for each <tool_call>. */
void tool_call_start(struct tool_call *c, const char *opening);
void tool_call_free(struct tool_call *c);

/* Takes text[n]; returns how many bytes were taken. With status CLOSED, c->raw holds text that was
 * taken but belongs to the reply's text, and the bytes not taken do as well. */
size_t tool_call_feed(struct tool_call *c, const char *text, size_t n,
                      enum tool_call_status *status);

/* Whether <tool_call> would begin another call here; otherwise it is part of a value. */
bool tool_call_may_restart(const struct tool_call *c);

/* The block ends here: by </tool_call> (or the next <tool_call>), or because the reply does
 * (cut_short). An unfinished call is closed as valid JSON. What was no call is left in raw. */
void tool_call_finish(struct tool_call *c, bool cut_short);

#endif
