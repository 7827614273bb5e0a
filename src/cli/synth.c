/* lily synth: a random checkpoint of either shape. */
#include "base/clock.h"
#include "base/file.h"
#include "cli/command.h"
#include "cli/interrupt.h"
#include "cli/model_options.h"
#include "cli/output.h"

int cmd_synth(int argc, char **argv) {
    bool force = false, json = false;
    lily_synth_options o = {.shape = "qwen3.6-35b-a3b"};
    const struct option options[] = {
        OPT(NAME, "shape", 0, &o.shape, "NAME", "qwen3.6-35b-a3b or mini"),
        OPT_RANGE(INT, "layers", &o.layers, "N", 0, 1024,
                  "a multiple of 4; 0: all layers of the shape"),
        OPT(U64, "seed", 0, &o.seed, "N", "same seed, same checkpoint"),
        OPT_FLAG("packed", 0, &o.packed, "write a packed file instead of an MLX 4-bit folder"),
        OPT_FLAG("force", 0, &force, "with --packed: write over an existing OUT"),
        JSON_OPTION(&json),
    };
    const struct usage usage = {
        .command = "synth",
        .operands = "OUT",
        .summary = "write a random checkpoint for measurements",
        .about = "Weights are random with sane statistics: speed and memory are those of the real "
                 "model, its text is noise.",
        .example = "lily synth --shape qwen3.6-35b-a3b --layers 8 /tmp/cut8",
        USAGE_OPTIONS(options),
        .min_operands = 1,
        .max_operands = 1,
        .named_operands = true,
    };
    const char *out;
    int status = options_parse(&usage, argc, argv, &out, NULL);
    if (status != OPTIONS_GO_ON) return status;
    /* Every fourth layer is full attention: only whole groups of four are a model. */
    if (o.layers % 4)
        return usage_error("synth", "--layers: found %d, expected a multiple of 4", (int)o.layers);
    /* A folder is never written over: lily_synth says what to do instead. */
    if (!force && o.packed && file_exists(out) && !file_is_dir(out))
        return fail_text("%s: exists already; give --force to write over it", out);
    struct work_bar bar = {0};
    lily_err err = {0};
    interrupt_catch();
    double started = clock_seconds();
    int rc = lily_synth(out, &o, work_bar_update, &bar, &err);
    work_bar_end(&bar);
    if (rc) return fail(&err);
    double seconds = clock_seconds() - started;
    if (json)
        return print_json(json_pack("{s:o, s:s, s:i, s:I, s:b, s:f}", "out", words_json(out),
                                    "shape", o.shape, "layers", (int)o.layers, "seed",
                                    (json_int_t)o.seed, "packed", (int)o.packed, "seconds",
                                    seconds));
    printf("%s: random %s, written in %.1f s\n", out, o.shape, seconds);
    return EXIT_OK;
}
