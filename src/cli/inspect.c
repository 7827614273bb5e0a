/* lily inspect: what a checkpoint is and whether it fits. */
#include "cli/command.h"
#include "cli/document.h"
#include "cli/options.h"
#include "cli/output.h"
#include "lily.h"

/* What counts bytes in the "memory" part. */
static const char *const byte_names[] = {"weights", "session", "needed", "present", NULL};

int cmd_inspect(int argc, char **argv) {
    bool json = false;
    const char *model = NULL, *operand = NULL;
    const struct option options[] = {
        OPT(NAME, "model", 'm', &model, "PATH", "the same as the operand"),
        JSON_OPTION(&json),
    };
    const struct usage usage = {
        .command = "inspect",
        .operands = "[PATH]",
        .summary = "what a checkpoint is and whether it fits",
        .about = "PATH is a folder or a packed file; without it the stand-in inside the program is "
                 "shown. Of a folder it reads headers, scales and small tensors, of a packed file "
                 "everything, to compare its checksums. Exit status 1: this program cannot run it.",
        .example = "lily inspect Qwen3.6-35B-A3B-4bit",
        USAGE_OPTIONS(options),
        .max_operands = 1,
        .named_operands = true,
    };
    int status = options_parse(&usage, argc, argv, &operand, NULL);
    if (status != OPTIONS_GO_ON) return status;
    if (model && operand) return usage_error("inspect", "give one of PATH and --model");
    char *text;
    lily_err err = {0};
    if (lily_inspect(model ? model : operand, &text, &err)) return fail(&err);
    json_t *doc = take_json(text, "inspect");
    if (!doc) return EXIT_FAILED;
    /* Scripts ask by the exit status whether a checkpoint can be run. */
    status = json_array_size(json_object_get(doc, "faults")) ? EXIT_FAILED : EXIT_OK;
    /* Faults are the result here, not an error: the document is printed with them. */
    if (json) {
        int printed = print_json(doc);
        return printed ? printed : status;
    }
    print_document(doc, byte_names);
    json_decref(doc);
    return status;
}
