/* lily pack: a checkpoint folder to one file in the layout the kernels want. */
#include <sys/stat.h>

#include "base/clock.h"
#include "base/file.h"
#include "cli/command.h"
#include "cli/interrupt.h"
#include "cli/model_options.h"
#include "cli/output.h"

/* The size is asked from the file that is there now, not added up from what was meant. */
static int print_packed(const char *in, const char *out, double seconds, bool json) {
    char size[BYTES_ROOM];
    struct stat st;
    uint64_t bytes = stat(out, &st) == 0 ? (uint64_t)st.st_size : 0;
    if (json)
        return print_json(json_pack("{s:o, s:o, s:I, s:f}", "in", words_json(in), "out",
                                    words_json(out), "bytes", (json_int_t)bytes, "seconds",
                                    seconds));
    printf("%s: %s, packed in %.1f s\n", out, format_bytes(size, sizeof size, (double)bytes),
           seconds);
    return EXIT_OK;
}

int cmd_pack(int argc, char **argv) {
    bool force = false, json = false;
    const struct option options[] = {
        OPT_FLAG("force", 0, &force, "overwrite OUT"),
        JSON_OPTION(&json),
    };
    const struct usage usage = {
        .command = "pack",
        .operands = "IN OUT",
        .summary = "a checkpoint folder to one memory-mapped file",
        .about =
            "IN is an MLX 4-bit or an unquantised Hugging Face folder; OUT appears complete or "
            "not at all. Packing changes no quantised value; it makes starts fast.",
        .example = "lily pack Qwen3.6-35B-A3B-4bit qwen.lily",
        USAGE_OPTIONS(options),
        .min_operands = 2,
        .max_operands = 2,
        .named_operands = true,
    };
    const char *path[2];
    int status = options_parse(&usage, argc, argv, path, NULL);
    if (status != OPTIONS_GO_ON) return status;
    /* Before the weights are read: a refused name should cost nothing. */
    if (file_is_dir(path[1])) return fail_text("%s: found a folder, expected a file name", path[1]);
    if (!force && file_exists(path[1]))
        return fail_text("%s: exists already; give --force to overwrite it", path[1]);
    struct work_bar bar = {0};
    lily_err err = {0};
    interrupt_catch();
    double started = clock_seconds();
    int rc = lily_pack(path[0], path[1], work_bar_update, &bar, &err);
    work_bar_end(&bar);
    return rc ? fail(&err) : print_packed(path[0], path[1], clock_seconds() - started, json);
}
