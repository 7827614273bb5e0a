/* The checkpoint tools of lily.h: thin over ckpt/. */
#include "ckpt/ckpt.h"
#include "engine/engine.h"
#include "lily.h"

struct forward {
    lily_progress_fn progress;
    void *arg;
    const char *label;
};

static int on_progress(void *arg, uint64_t done, uint64_t total) {
    const struct forward *f = arg;
    return f->progress(f->arg, f->label, "B", done, total);
}

int lily_pack(const char *in, const char *out, lily_progress_fn progress, void *arg,
              lily_err *err) {
    struct forward f = {progress, arg, "pack"};
    const struct ckpt_options options = {
        .progress = progress ? on_progress : NULL, .progress_arg = &f, .check = engine_check_texts};
    return ckpt_pack(in, out, &options, err);
}

int lily_synth(const char *out, const lily_synth_options *options, lily_progress_fn progress,
               void *arg, lily_err *err) {
    struct forward f = {progress, arg, "synth"};
    const struct ckpt_synth_options synth = {.shape = options->shape,
                                             .layers = options->layers,
                                             .seed = options->seed,
                                             .packed = options->packed,
                                             .progress = progress ? on_progress : NULL,
                                             .progress_arg = &f};
    return ckpt_synth(out, &synth, err);
}

int lily_inspect(const char *path, char **json, lily_err *err) {
    return ckpt_inspect(path, engine_check_texts, json, err);
}
