/* The CUDA backend. Host in C against the driver API, which is opened at run time; kernels compiled
 * per shape and embedded. One file per concept, in the order a process meets them:
 *
 *   driver.c    libcuda.so.1: found, checked, its errors as messages
 *   module.c    the embedded kernels of a shape, loaded
 *   upload.c    weights into device memory, memory preflight
 *   cuda.c      opening a model, statistics, the table
 *   session.c   what a sequence remembers, in device memory
 *   paths.c     the ways to run a decode step, in order of preference
 *   scratch.c   where the arrays of a step lie
 *   step.c      decode: slots checked, up to two steps in flight, results handed over
 *   layers.c    the layers made of portable kernels, for prompts and decode steps
 *   prefill.c   a chunk of a prompt
 *   chunk.c     how long it may be
 *   prompt.c    its layers made of kernels for sm_90a
 *   portable.c  a decode step through the portable kernels
 *   batch.c     a decode step of 2 to 64 slots
 *   decode.c    a decode step as one persistent kernel (sm_90a)
 *   record.c    a driver that counts what a step would queue
 *   plan.c      what a step costs
 *   selftest.c  the device at hand against the reference
 *   kernels/    device.h: what host and kernels share; portable_*.cu: any card from 8.0; the others
 *               are for sm_90a
 *
 * Everything is queued on one stream, so that its order is the order of the calls. */
#ifndef LILY_CUDA_CUDA_H
#define LILY_CUDA_CUDA_H

#include "backend/backend.h"
#include "backend/cuda/driver.h"
#include "backend/cuda/kernels/device.h"

enum {
    CUDA_CHUNK = 4096,     /* rows of one prefill step at most */
    CUDA_LEAST_ROWS = 512, /* where memory is short they are halved down to so many */
    CUDA_MOST_SESSIONS = 1024,
    CUDA_IN_FLIGHT = 2,
    CUDA_ALIGN = 256, /* of every array in device memory */
    CUDA_MIN_CAPABILITY = 80,
    CUDA_HEAD_ROWS = 32 /* rows of logits at once */
};

static inline size_t cuda_aligned(size_t bytes) {
    return (bytes + CUDA_ALIGN - 1) / CUDA_ALIGN * CUDA_ALIGN;
}

/* The model in device memory. */
struct cuda_weights {
    struct cuda_mat embed;    /* [V, H] */
    struct cuda_mat lm_head;  /* [V, H] */
    CUdeviceptr final_norm;   /* float [H] */
    struct cuda_layer *layer; /* [layers] on the host, owned */
    CUdeviceptr inv_freq;     /* float [rotary_dim / 2] of RoPE, as ref computes them */
    CUdeviceptr arena;        /* all of it, one allocation */
    size_t bytes;
};

/* Scratch of a step of up to R rows (scratch.c). A prompt chunk's arrays lie over each other where
 * they are not alive at once, a decode step's do not. Where prompt.c runs the chunk, its kernels
 * have another type: / says which. */
struct cuda_scratch {
    CUdeviceptr x;         /* float [R][H] residual stream */
    CUdeviceptr normed;    /* float [R][H] / two bf16 [R][H] for products that decide */
    CUdeviceptr normed_bf; /* bf16 [R][H] the same, rounded */
    CUdeviceptr wide;      /* float / fp16 [R][proj_width] a mixer's projections */
    CUdeviceptr channels;  /* float / bf16 [R][conv_dim] after the convolution */
    CUdeviceptr queries;   /* float / bf16 [R][q_dim] after RoPE */
    CUdeviceptr norms;     /* float [R][2 * gdn_k_heads] factors of queries and keys */
    CUdeviceptr gates;     /* float [R][2 * gdn_v_heads] beta, then decay */
    CUdeviceptr delta;     /* float / fp16 [R][gdn_v_dim] */
    CUdeviceptr mix;       /* float [R][max(q_dim, gdn_v_dim)] input of the output projection */
    CUdeviceptr mix_bf;    /* bf16, the same */
    CUdeviceptr out;       /* float / fp16 [R][H] */
    CUdeviceptr scores;    /* float [R][E + 1] / in parts; before that [R][2 * gdn_v_heads] of ba */
    CUdeviceptr routing;   /* float [R][2 * top_k] ids in descending order of weight, weights */
    CUdeviceptr hidden;    /* bf16 (prefill) or float (decode) [R][top_k + 1][I] */
    CUdeviceptr given;     /* float / fp16 [R * top_k][H] what experts give; in decode steps wide */
    CUdeviceptr experts;   /* int32: counts, offsets, block map of the grouped products */
    CUdeviceptr pairs;     /* int32 [R * top_k] row * top_k + choice, sorted by expert */
    CUdeviceptr places;    /* int32 [R * top_k] where a pair lies in pairs */
    CUdeviceptr partial;   /* float: partial attention of decode steps */
    CUdeviceptr ids;       /* int32 [rows] tokens of a prompt chunk */
    CUdeviceptr logits;    /* float [max_sessions], of a prompt [CUDA_HEAD_ROWS], [V] */
    CUdeviceptr finite; /* int32 [max_sessions + 1]: 0 after a NaN or infinity; last: of a prompt */
    CUdeviceptr sampling; /* candidates of the device's sampling, see portable_sample.cu */
    CUdeviceptr sampled;  /* uint32 [(V + 31) / 32] bits of the ids that may be sampled */
    /* prompt.c alone: what pieces of the delta rule leave (decays, w, p, u at pieces_at); sums of
     * segments of the context; sums of the inputs of products that decide; rows of each expert. */
    CUdeviceptr pieces, parts, parts_sums, sums, counts;
    size_t pieces_at[4];
};

/* scratch.c: places the arrays of decode steps and of prompt chunks (with `fast`, as prompt.c needs
 * them) in one allocation from base on; its bytes. */
size_t cuda_place_scratch(const struct backend_model *m, bool fast, CUdeviceptr base,
                          struct cuda_scratch *step, struct cuda_scratch *chunk);
/* Bytes for either kind of chunk. */
size_t cuda_scratch_bytes(const struct backend_model *m);

/* cuda.c. Bytes of device memory that a model and its sessions take, once the weights are planned;
 * reserve: what the driver still takes once there is a context; context: what that took. */
struct cuda_need {
    size_t weights, scratch, sessions, reserve, context;
};
struct cuda_need cuda_need(const struct backend_model *m);

/* cuda.c: what follows from shape, layers and options. */
void cuda_set_sizes(struct backend_model *m);

/* cuda.c: open what goes on without: the prompt kernels, before scratch is allocated, and the
 * decode paths of a model whose weights and scratch are in place. Those that memory or kernels lack
 * for are left out, but for the portable ones. */
int cuda_open_prompts(struct backend_model *m, lily_err *err);
int cuda_open_paths(struct backend_model *m, lily_err *err);

/* One decode step on its way. Its slots lie in pinned host memory and, once queued, in device
 * memory; results and logits come back to pinned memory. */
struct cuda_step {
    int32_t n;               /* slots */
    struct cuda_slot *slots; /* [max_sessions] pinned */
    CUdeviceptr slots_device;
    struct cuda_result *results; /* [max_sessions] pinned */
    CUdeviceptr results_device;
    float *logits; /* [max_sessions][V] pinned */
    bool any_logits;
    CUevent done;               /* after results and logits have arrived */
    struct decode_slot *wanted; /* [max_sessions] as submitted */
};

/* A way to run decode steps on this card, chosen at open: the first of cuda_paths whose open
 * succeeds with *usable set, and for each step the first opened one that takes it. */
struct cuda_path {
    const char *name; /* "persistent sm_90a" */
    bool lean;        /* queue calls cuda_step_send and cuda_step_fetch where it needs them */
    /* Loads kernels, allocates; *usable false with LILY_OK: not for this card or shape. */
    int (*open)(struct backend_model *m, bool *usable, lily_err *err);
    void (*close)(struct backend_model *m);
    bool (*takes)(const struct backend_model *m, const struct cuda_step *step);
    /* Queues the step on m->stream: reads step->slots_device (already queued) and leaves
     * results_device and, for slots that want them, rows of x.logits [slot][V]. Sampled tokens go
     * to each slot's token too. */
    int (*queue)(struct backend_model *m, struct cuda_step *step, lily_err *err);
};
extern const struct cuda_path *const cuda_paths[]; /* ended by NULL; the portable path is last */
extern const struct cuda_path cuda_path_decode;    /* decode.c */
extern const struct cuda_path cuda_path_batch;     /* batch.c */
extern const struct cuda_path cuda_path_portable;  /* portable.c */

enum { CUDA_MAX_PATHS = 4 };

struct backend_model {
    const struct weights *w; /* the caller's, outlives the model */
    struct backend_options options;
    const struct cuda_driver *d;
    CUdevice device;
    CUcontext context;
    CUstream stream;
    char name[96];        /* of the device */
    int32_t capability;   /* 90: sm_90 */
    int32_t processors;   /* multiprocessors */
    int32_t shared_limit; /* bytes of shared memory one block may use */
    int32_t attention_layers, gdn_layers;
    int32_t rows;          /* most rows of a prompt chunk */
    int32_t proj_width;    /* rows of the taller of qkvz and qkv */
    int32_t sessions;      /* open now */
    int32_t sampled_below; /* ids from here on are never sampled; */
    bool has_holes;        /* and some before it are not: those that x.sampled says */
    struct cuda_weights dw;
    struct cuda_scratch x;     /* of decode steps */
    struct cuda_scratch chunk; /* of prompt chunks, in the same memory: */
    CUdeviceptr scratch_block;
    struct cuda_modules *modules;                  /* module.c */
    struct cuda_portable *portable;                /* prefill.c: its kernels */
    struct cuda_decode *decode;                    /* decode.c: what it needs; NULL: not in use */
    struct cuda_prompt *prompt;                    /* prompt.c, the same; */
    bool prompt_missing;                           /* its kernels could not be opened */
    struct cuda_batch *batch;                      /* batch.c, the same */
    const struct cuda_path *paths[CUDA_MAX_PATHS]; /* opened, in order of preference */
    int32_t n_paths;
    struct cuda_step steps[CUDA_IN_FLIGHT]; /* a ring */
    int32_t first_step, n_steps;            /* oldest in flight, number in flight */
    CUdeviceptr steps_block;
    struct cuda_slot *prompt_slot; /* pinned, of a prompt chunk */
    CUdeviceptr prompt_slot_device;
    int32_t *prompt_ids;      /* [R] pinned */
    int32_t *prompt_finite;   /* pinned */
    double operation_seconds; /* chunk.c; 0: nothing was timed yet */
    float *trace_rows;        /* host memory for a traced row; NULL without a trace */
};

/* Everything a sequence remembers. */
struct backend_session {
    struct backend_model *model;
    int32_t context;      /* most tokens */
    int32_t capacity;     /* rows of keys and values */
    int32_t position;     /* tokens consumed, steps in flight included */
    int32_t kv_rows;      /* leading positions whose KV rows are held, at least position */
    int32_t parity;       /* which of the two buffers holds the present state */
    bool can_rewind;      /* the newest step was a decode step and has not been taken back */
    bool sampled;         /* the newest step samples on the device */
    CUdeviceptr state[2]; /* float [gdn_layers][gdn_v_heads][128 key][128 value] */
    CUdeviceptr conv[2];  /* float [gdn_layers][3][conv_dim], oldest first; follows its state */
    CUdeviceptr keys;     /* bf16 [attention_layers][kv_heads][capacity][head_dim] */
    CUdeviceptr values;   /* the same */
    CUdeviceptr token;    /* int32: sampled last */
    CUdeviceptr counts;   /* int32 [V] */
    CUdeviceptr block;
    size_t bytes;
};

/* A saved state in device memory: [gdn_layers][gdn_v_heads][128 key][128 value] recurrent, then
 * [gdn_layers][3][conv_dim], float32. */
struct backend_state {
    const struct backend_model *model;
    CUdeviceptr data;
};

static inline const struct shape *model_shape(const struct backend_model *m) {
    return m->w->shape;
}

/* Makes the model's context current for this thread: first thing in every entry point. */
int cuda_enter(const struct backend_model *m, lily_err *err);

/* Memory on the device, CUDA_ALIGN-aligned; the caller frees with m->d->memory_free. */
int cuda_memory(const struct backend_model *m, size_t bytes, const char *what, CUdeviceptr *out,
                lily_err *err);

/* Host memory that copies run beside, the caller's to free with m->d->host_free. */
int cuda_pinned(const struct backend_model *m, size_t bytes, void **out, lily_err *err);

/* cuda.c: scratch and what steps need, by the sizes of m; cuda_close frees a model in any state. */
int cuda_allocate(struct backend_model *m, lily_err *err);
void cuda_close(struct backend_model *m);

/* module.c. The kernels embedded for a shape: one module per kernel file. */
int cuda_modules_load(const struct cuda_driver *d, const struct shape *shape, int32_t capability,
                      struct cuda_modules **out, lily_err *err);
void cuda_modules_free(const struct cuda_driver *d, struct cuda_modules *modules);
/* Every kernel there could be, for a driver that loads none. */
int cuda_modules_any(struct cuda_modules **out, lily_err *err);
bool cuda_kernels_embedded(const char *shape); /* for a shape's name; NULL: for any */
/* A kernel by its file ("portable_gemm") and name, with room for `shared` bytes of dynamic shared
 * memory. */
int cuda_function(const struct cuda_driver *d, struct cuda_modules *modules, const char *file,
                  const char *kernel, size_t shared, CUfunction *out, lily_err *err);

/* Bytes of stack of a thread that the kernels found so far need. */
size_t cuda_modules_stack(const struct cuda_modules *modules);

/* Queues kernel f on the model's stream: grid (gx, gy, gz), block threads, arguments by address. */
int cuda_launch(const struct backend_model *m, CUfunction f, unsigned gx, unsigned gy, unsigned gz,
                unsigned threads, size_t shared, void **arguments, lily_err *err);

/* upload.c. cuda_weights_plan decides how every matrix lies on the model's card: m->dw with its
 * bytes, places counted from 0. cuda_upload allocates that and fills it. */
int cuda_check_weights(const struct weights *w, lily_err *err);
int cuda_weights_plan(struct backend_model *m, lily_err *err);
int cuda_upload(struct backend_model *m, lily_err *err);
void cuda_weights_free(struct backend_model *m);

/* pack.c. A matrix as tiles (kernels/tile.h): rows of n matrices of one width below each other, or
 * in turns (row 0 of each, row 1 of each, ...). */
struct cuda_tiles {
    enum cuda_layout layout;
    bool slices; /* tiles of the same inputs follow each other; else those of the same rows */
    bool in_turns;
    int32_t n, rows, cols; /* rows of all */
    const struct mat *from[4];
};
size_t cuda_tiles_bytes(const struct cuda_tiles *t);
/* Bytes [begin, end) of the tiles to out; any thread. */
void cuda_tiles_fill(const struct cuda_tiles *t, size_t begin, size_t end, char *out);
/* How kernels see these tiles at an address; the matrix's rows are those of t. */
struct cuda_mat cuda_tiles_mat(const struct cuda_tiles *t, CUdeviceptr at);
struct cuda_mat cuda_planar_mat(int32_t rows, int32_t cols, int32_t bits);

/* layers.c: the kernels that prompts and portable decode share, and the layers made of them. */

/* Rows on their way through the layers: of one slot (a prompt chunk) or one of each of several. */
struct cuda_run {
    struct cuda_scratch *x;
    const struct cuda_slot *slots; /* on the host: positions */
    CUdeviceptr slots_device;
    int32_t n_slots;
    int32_t rows_per_slot; /* 1: decode; rows = n_slots * rows_per_slot */
    bool prompt;           /* of one slot: tokens from x.ids, softmax over tiles of the context */
    bool matrix;           /* products by tensor cores from bf16; else float32 throughout */
};
static inline int32_t cuda_run_rows(const struct cuda_run *run) {
    return run->n_slots * run->rows_per_slot;
}
int cuda_portable_open(struct backend_model *m, lily_err *err);
/* The same with no kernels behind the names: for a driver that only counts. */
int cuda_portable_none(struct backend_model *m, lily_err *err);
void cuda_portable_close(struct backend_model *m);
/* x.x = embedding rows of x.ids (prompt), or of the slots' tokens; then all layers. */
int cuda_run_layers(struct backend_model *m, const struct cuda_run *run, lily_err *err);
/* x.logits[n] = the head of rows [first, first + n) of x.x, n <= CUDA_HEAD_ROWS or decode. */
int cuda_run_head(struct backend_model *m, const struct cuda_run *run, int32_t first, int32_t n,
                  lily_err *err);
/* flags[i / per_flag] of x.finite + at become 0 where row i of data[rows][width] is not finite. */
int cuda_check_rows(struct backend_model *m, CUdeviceptr data, int32_t rows, int64_t width,
                    int32_t per_flag, int32_t at, lily_err *err);
/* Picks for slots that sample, checks logits, and leaves results: after cuda_run_head, or without
 * it when no slot wants logits. Usable by every decode path. */
int cuda_run_sampling(struct backend_model *m, CUdeviceptr slots, int32_t n, bool head,
                      CUdeviceptr results, lily_err *err);
/* counts[id] = 1 for the ids of a prompt, at most R of them; waits for it. */
int cuda_mark_prompt(struct backend_session *s, const int32_t *ids, int32_t n, lily_err *err);
/* Reports rows to the test that asked for it; waits for the device. */
int cuda_trace(struct backend_model *m, const struct cuda_run *run, enum stage stage, int32_t layer,
               CUdeviceptr data, size_t ld, int32_t n, lily_err *err);

/* Bytes that the persistent decode step (decode.c) takes beside the weights, once those are
 * planned; 0 where it does not suit the card or the weights. */
size_t cuda_decode_bytes(const struct backend_model *m);
/* Of those what a step reads in a layer: router times output projection. */
size_t cuda_decode_score_bytes(const struct backend_model *m, int32_t layer);
int32_t cuda_decode_stages(const struct backend_model *m); /* of its step: see cuda-decode.md */

/* prompt.c: whether its kernels suit the card and the weights, once those are planned, and are not
 * known to be missing; opening leaves m->prompt NULL where they do not;
 * cuda_prompt_layers is cuda_run_layers for a prompt, where it is not. */
bool cuda_prompt_suits(const struct backend_model *m);
int cuda_prompt_open(struct backend_model *m, lily_err *err);
void cuda_prompt_close(struct backend_model *m);
int cuda_prompt_layers(struct backend_model *m, const struct cuda_run *run, lily_err *err);

/* chunk.c: rows of the next prompt chunk at most, by the time that earlier ones took; a multiple of
 * BACKEND_GRID where there is memory for so many. */
int32_t cuda_chunk_rows(const struct backend_model *m, int32_t position);
void cuda_chunk_took(struct backend_model *m, int32_t position, int32_t n, double seconds);

/* prefill.c: the backend's prefill */
int cuda_prefill(struct backend_session *s, struct prefill_step *step, lily_err *err);
/* What a slot needs to know of its session for the next step; flips nothing. */
void cuda_slot_of(const struct backend_session *s, struct cuda_slot *out);

/* step.c: the backend's functions of the same names */
int cuda_steps_open(struct backend_model *m, lily_err *err);
void cuda_steps_close(struct backend_model *m);
size_t cuda_steps_bytes(const struct backend_model *m);
/* Queue a step's slots to slots_device, with flags that say finite; results to the host. */
int cuda_step_send(struct backend_model *m, const struct cuda_step *step, lily_err *err);
int cuda_step_fetch(struct backend_model *m, const struct cuda_step *step, lily_err *err);
int cuda_decode_submit(struct backend_model *m, const struct decode_slot *slots, int32_t n,
                       lily_err *err);
int cuda_decode_wait(struct backend_model *m, struct decode_result *results, int32_t n,
                     lily_err *err);

/* session.c: the backend's functions of the same names */
int cuda_session_new(struct backend_model *m, int32_t context, struct backend_session **out,
                     lily_err *err);
void cuda_session_free(struct backend_session *s);
int32_t cuda_position(const struct backend_session *s);
void cuda_reset(struct backend_session *s);
size_t cuda_session_bytes(const struct backend_model *m, int32_t context);
size_t cuda_state_bytes(const struct backend_model *m);
int cuda_state_new(struct backend_model *m, struct backend_state **out, lily_err *err);
void cuda_state_free(struct backend_state *state);
int cuda_state_save(struct backend_session *s, struct backend_state *to, lily_err *err);
int cuda_state_restore(struct backend_session *s, const struct backend_state *from, int32_t pos,
                       lily_err *err);
int cuda_state_export(const struct backend_state *from, void *out, lily_err *err);
int cuda_state_import(struct backend_state *to, const void *in, lily_err *err);
size_t cuda_kv_bytes(const struct backend_model *m, int32_t n);
int cuda_kv_export(struct backend_session *s, int32_t from, int32_t n, void *out, lily_err *err);
int cuda_kv_import(struct backend_session *s, int32_t from, int32_t n, const void *in,
                   lily_err *err);
int cuda_sample_begin(struct backend_session *s, const int32_t *prompt, int32_t n, lily_err *err);
int cuda_rewind(struct backend_session *s, lily_err *err);

/* record.c. Device memory is addresses alone and kernels do not run; on one thread at a time. */
struct cuda_record {
    int32_t launches, waits;  /* kernels queued; times the host waited */
    int32_t steps;            /* persistent decode steps among the kernels */
    int32_t attention_blocks; /* of rows, each of which reads the context, in a prompt */
    uint32_t arrivals;        /* at the grid's barrier, in the last persistent step but one */
    uint32_t arrived;
    CUdeviceptr next; /* address to be given out */
    size_t refuse;    /* 0, or: an allocation of so many bytes fails */
};
void cuda_record_begin(struct cuda_record *r, struct cuda_driver *d); /* both outlive what uses d */
void cuda_record_end(void);

/* selftest.c */
int cuda_selftest(const struct selftest_args *args, lily_err *err);

/* plan.c: weights of the published widths without values, and a model of them that is opened on d
 * as on an H200 but for the upload; *out is the caller's to close, also after an error. */
int cuda_sized_weights(const struct shape *s, int32_t layers, struct weights *out, lily_err *err);
void cuda_sized_weights_free(struct weights *w);
int cuda_open_recorded(const struct weights *w, const struct backend_options *options,
                       const struct cuda_driver *d, struct backend_model **out, lily_err *err);
/* Adds to p the bytes of a step by how m's weights lie: those of weights, state, and keys and
 * values once each; read_bytes and written_bytes with what the stages hand to each other, and keys
 * and values as often as there are passes over them. Experts: as many as are expected to be chosen.
 */
void cuda_step_bytes(const struct backend_model *m, const struct plan_query *q, int32_t passes,
                     struct backend_plan *p);
int cuda_plan(const struct shape *shape, const struct plan_query *query, struct backend_plan *out,
              lily_err *err);

#endif
