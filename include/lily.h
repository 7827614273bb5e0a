/* lily: a local inference engine for Qwen3.6-35B-A3B.
 *
 *     lily_engine *engine;
 *     lily_session *session;
 *     lily_tokens prompt = {0};
 *     lily_result result;
 *     lily_err err;
 *     lily_engine_options options = {0};                // the embedded stand-in, best backend
 *     if (lily_engine_open(&options, &engine, &err)) die(err.msg);
 *     lily_session_new(engine, 0, &session, &err);
 *     const char *messages = "[{\"role\":\"user\",\"content\":\"Hi\"}]";
 *     lily_chat_prompt(engine, messages, NULL, NULL, &prompt, &err);
 *     lily_request request = {.prompt = prompt.ids, .n_prompt = prompt.n, .in_think = true,
 *                             .on_event = print_event};
 *     lily_generate(session, &request, &result, &err);
 *
 * Two opaque types. An engine is a loaded checkpoint on a backend; a session is one sequence of
 * tokens with its state. The caller always hands over the full prompt; the session re-reads only
 * what it has not read. Functions return 0 or a negative LILY_E* code (lily_error.h). One thread
 * at a time may call into an engine and its sessions, except for lily_cancel and for functions that
 * take a const engine (text, info, defaults): those run beside it, and callbacks may use them.
 * Anything else that a callback asks of a session of the same engine is refused with LILY_EBUSY,
 * and lily_session_reset then only cancels. Strings are UTF-8. */
#ifndef LILY_H
#define LILY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lily_error.h"

#define LILY_VERSION "0.1.0"

typedef struct lily_engine lily_engine;
typedef struct lily_session lily_session;

/* Long work reports here; label is static ("load", "upload"). Nonzero return cancels. */
typedef int (*lily_progress_fn)(void *arg, const char *label, const char *unit, uint64_t done,
                                uint64_t total);
typedef void (*lily_log_fn)(void *arg, const char *line);

/* ---- engine ---------------------------------------------------------------------------------- */

typedef struct lily_engine_options {
    const char *model;         /* folder or packed file; NULL: the embedded stand-in */
    const char *backend;       /* "cpu", "ref", ...; NULL or "auto": the best that is usable */
    int32_t threads;           /* 0: one per physical core, fewer for small models */
    int32_t context;           /* tokens a session may hold; 0: 32,768 or what fits */
    int32_t max_sessions;      /* 0: 1 */
    bool keep_bf16;            /* run an unquantised folder as it is (ref only) */
    uint64_t state_bytes;      /* a session's recurrent states kept to resume from; 0: 384 MiB */
    lily_progress_fn progress; /* may be NULL */
    lily_log_fn log;           /* warnings and choices made, one line each; may be NULL */
    void *arg;                 /* for progress and log */
} lily_engine_options;

int lily_engine_open(const lily_engine_options *options, lily_engine **out, lily_err *err);
void lily_engine_close(lily_engine *e); /* after all its sessions; NULL is fine */

typedef struct lily_engine_info {
    const char *model_name; /* "qwen3.6-35b-a3b" or "mini" */
    const char *model_path;
    const char *model_kind; /* "MLX 4-bit folder", "packed file", "embedded", ... */
    const char *checkpoint; /* 64 hex digits that name its contents */
    const char *backend;
    const char *device;  /* "AMD EPYC, 2 threads" */
    const char *reason;  /* why this backend */
    const char *kernels; /* which of its kernels run: "avx512-vnni"; may be empty */
    int32_t layers, vocab, context;
    uint64_t weight_bytes, session_bytes, scratch_bytes;
    uint64_t bytes_per_token;    /* read per decoded token at depth 0 */
    uint64_t kv_bytes_per_depth; /* and for each token of depth */
    double bandwidth; /* bytes a second of a GPU's memory, as its driver tells; 0: unknown */
    double load_seconds;
} lily_engine_info;
/* Strings are valid until lily_engine_close. */
void lily_engine_get_info(const lily_engine *e, lily_engine_info *out);

/* Sampling defaults of the checkpoint (generation_config.json) and of the model card's tables. */
typedef struct lily_sampling {
    float temperature;                                             /* below 1e-5: argmax */
    int32_t top_k;                                                 /* 0: off */
    float top_p;                                                   /* 1: off */
    float min_p;                                                   /* 0: off */
    float presence_penalty, frequency_penalty, repetition_penalty; /* 0, 0, 1: off */
    uint64_t seed;           /* same seed and prompt: same text */
    bool random_seed;        /* draw one from the system instead */
    const int32_t *bias_ids; /* [n_bias] logit_bias */
    const float *bias;       /* [n_bias] added to the logits */
    int32_t n_bias;
} lily_sampling;
/* Which source wins is told in docs/sampling.md. Sets random_seed. */
void lily_sampling_defaults(const lily_engine *e, bool thinking, lily_sampling *out);
/* What lily_generate checks first: LILY_EINVAL names the field, what was found and its range. */
int lily_sampling_check(const lily_engine *e, const lily_sampling *sampling, lily_err *err);

/* ---- text ------------------------------------------------------------------------------------ */

typedef struct lily_tokens {
    int32_t *ids; /* [n], owned by the struct */
    size_t n;
} lily_tokens;
void lily_tokens_free(lily_tokens *t);

/* control: recognise <|im_start|> and its like; false keeps them text. */
int lily_tokenize(const lily_engine *e, const char *text, size_t n, bool control, lily_tokens *out,
                  lily_err *err);
/* The bytes of one token, not necessarily whole code points; NULL: no such token. Engine's life. */
const char *lily_token_bytes(const lily_engine *e, int32_t id, size_t *n);

typedef struct lily_chat_options {
    bool no_thinking;       /* close the think block in the prompt */
    bool preserve_thinking; /* keep earlier turns' reasoning */
    bool no_generation_prompt;
} lily_chat_options;
/* messages, tools: JSON arrays as OpenAI's API has them (tools may be NULL, options too). */
int lily_chat_prompt(const lily_engine *e, const char *messages, const char *tools,
                     const lily_chat_options *options, lily_tokens *out, lily_err *err);
/* The same prompt as text, malloc'd for the caller. */
int lily_chat_text(const lily_engine *e, const char *messages, const char *tools,
                   const lily_chat_options *options, char **out, lily_err *err);

/* ---- generation ------------------------------------------------------------------------------ */

int lily_session_new(lily_engine *e, int32_t context, lily_session **out, lily_err *err);
void lily_session_free(lily_session *s);

enum lily_event_kind {
    LILY_EVENT_PREFILL,    /* done of total prompt tokens are read: at the start (those cached) and
                              after each chunk */
    LILY_EVENT_REASONING,  /* text: a piece of the think block */
    LILY_EVENT_CONTENT,    /* text: a piece of the answer */
    LILY_EVENT_TOOL_BEGIN, /* text: the function's name */
    LILY_EVENT_TOOL_ARGS,  /* text: more of the arguments' JSON */
    LILY_EVENT_TOOL_END,
};
typedef struct lily_event {
    enum lily_event_kind kind;
    const char *text; /* [n], zero-terminated, valid during the call */
    size_t n;
    int call; /* index of the tool call */
    int32_t done, total;
} lily_event;
/* Nonzero cancels the request: lily_generate returns 0 with LILY_FINISH_CANCELLED. */
typedef int (*lily_event_fn)(void *arg, const lily_event *event);

typedef struct lily_request {
    const int32_t *prompt; /* [n_prompt] the full prompt */
    size_t n_prompt;
    int32_t max_tokens;            /* 0: until the context ends */
    const lily_sampling *sampling; /* NULL: the defaults */
    const char *const *stops;      /* [n_stops] stop strings */
    size_t n_stops;
    const char *tools;      /* NULL or the JSON array the prompt was rendered with */
    bool in_think;          /* the prompt ends inside a think block */
    bool no_calls;          /* no tools were offered: a call that the model writes is text */
    bool ignore_eos;        /* measurements: go on after an end token */
    lily_event_fn on_event; /* may be NULL */
    void *arg;
} lily_request;

enum lily_finish {
    LILY_FINISH_STOP,   /* an end-of-turn token or a stop string */
    LILY_FINISH_LENGTH, /* max_tokens or the context's end */
    LILY_FINISH_TOOLS,  /* ended its turn after at least one tool call */
    LILY_FINISH_CANCELLED,
};
typedef struct lily_result {
    enum lily_finish finish;
    int32_t prompt_tokens;    /* of which */
    int32_t cached_tokens;    /* were already in the session */
    int32_t output_tokens;    /* sampled, a final end-of-turn token included; of which */
    int32_t reasoning_tokens; /* were inside the think block */
    uint64_t seed;            /* the seed used */
    double prefill_seconds, decode_seconds;
} lily_result;
/* The prompt must leave room for a token: else LILY_ECONTEXT with both numbers. max_tokens beyond
 * the context is clamped. Any error leaves the session usable; one of the model's or the backend's
 * empties it. */
int lily_generate(lily_session *s, const lily_request *request, lily_result *result, lily_err *err);

/* Makes the running lily_generate (sync, score) of s end within a token or a chunk, or, while it
 * reads the session back from disk, within a piece, and leaves what lily_session_idle is writing in
 * memory. Any thread, any time; without a running call it does nothing but make the next
 * lily_session_idle write nothing. */
void lily_cancel(lily_session *s);

/* ---- evaluation and measurement -------------------------------------------------------------- */

/* Brings the session to exactly ids[n] (reusing a common prefix) and leaves the next token's
 * logits in lily_session_logits. */
int lily_session_sync(lily_session *s, const int32_t *ids, size_t n, lily_err *err);
/* Appends one token by the decode path. */
int lily_session_step(lily_session *s, int32_t id, lily_err *err);
/* Appends id, then the likeliest token after it, and so on: n tokens by the path that lily_generate
 * takes, which may run one step ahead. token(arg, id) is called with each token picked, the last of
 * which is not appended; nonzero stops with LILY_ECANCELED. */
typedef int (*lily_token_fn)(void *arg, int32_t id);
int lily_session_greedy(lily_session *s, int32_t id, int32_t n, lily_token_fn token, void *arg,
                        lily_err *err);
/* [vocab], until the next call on s; NULL when the session is empty, the last call failed, or the
 * device sampled during it. */
const float *lily_session_logits(const lily_session *s);
void lily_session_reset(lily_session *s);
/* Tokens held, in memory or on disk: a prompt that begins with them does not have them read again.
 * 0 after an error that emptied the session; any other error leaves them. Not beside a running
 * call. */
int32_t lily_session_held(const lily_session *s);

/* To be called every few seconds while nothing is asked of the session: where the system is short
 * of memory all that the session holds goes to disk, to a file that nobody else can read, until the
 * next call, which takes longer by the reading. A full disk is tried again, ever less often. False:
 * further calls are of no use, since nothing here tells of such a shortage. */
bool lily_session_idle(lily_session *s);

/* Teacher-forced logits: row(arg, i, logits[vocab]) after each ids[i]; nonzero stops with
 * LILY_ECANCELED. Starts from an empty session and leaves ids[n] in it. */
typedef int (*lily_logits_fn)(void *arg, size_t i, const float *logits);
int lily_session_score(lily_session *s, const int32_t *ids, size_t n, lily_logits_fn row, void *arg,
                       lily_err *err);

/* ---- checkpoints ----------------------------------------------------------------------------- */

int lily_pack(const char *in, const char *out, lily_progress_fn progress, void *arg, lily_err *err);
typedef struct lily_synth_options {
    const char *shape; /* "qwen3.6-35b-a3b" or "mini" */
    int32_t layers;    /* a multiple of 4; 0: all */
    uint64_t seed;
    bool packed; /* a packed file instead of an MLX folder */
} lily_synth_options;
int lily_synth(const char *out, const lily_synth_options *options, lily_progress_fn progress,
               void *arg, lily_err *err);
/* A JSON document, malloc'd for the caller: what path is, whether it fits, classes, bytes, faults.
 */
int lily_inspect(const char *path, char **json, lily_err *err);
/* The machine and each backend: usable or not and why, as a JSON document, malloc'd. */
int lily_doctor(char **json, lily_err *err);

/* Backends' own tests of their kernels on the device at hand, against the reference backend. */
typedef struct lily_selftest_options {
    const char *backend; /* NULL: every usable one that has a test */
    const char *model;   /* a checkpoint: its first layers are used; NULL: random weights, written
                            to a file in /tmp that is gone afterwards */
    const char *shape;   /* of the random weights; NULL: the first, that of the full-size model */
    lily_progress_fn progress; /* may be NULL */
    void *arg;
} lily_selftest_options;
/* A JSON document, malloc'd: a list with an entry for each backend: passed, and its items. An error
 * when the weights cannot be made, or the backend asked for has no test here; an entry's error when
 * its test could not be run to its end. */
int lily_selftest(const lily_selftest_options *options, char **json, lily_err *err);

/* What steps cost by a backend's own recording of them, without device or checkpoint. */
typedef struct lily_plan_options {
    const char *backend;   /* one that records plans */
    const char *shape;     /* "qwen3.6-35b-a3b" or "mini"; NULL: the first */
    int32_t layers;        /* a multiple of 4; 0: all */
    const int32_t *depths; /* [n_depths] tokens in the KV cache; n_depths 0: a few */
    size_t n_depths;
    const int32_t *tokens; /* [n_tokens] 1: a decoded token, more: a chunk; n_tokens 0: 1 */
    size_t n_tokens;
    const int32_t *sessions; /* [n_sessions] that decode in one step; n_sessions 0: one */
    size_t n_sessions;       /* nothing given: a few depths, and a prompt chunk at depth 0 */
} lily_plan_options;
/* A JSON document, malloc'd: kernels, stages, barriers, bytes, and the fraction of the least. */
int lily_plan(const lily_plan_options *options, char **json, lily_err *err);

#endif
