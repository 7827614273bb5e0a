/* lily doctor: the machine, its backends and memory. */
#include "cli/command.h"
#include "cli/document.h"
#include "cli/options.h"
#include "cli/output.h"
#include "lily.h"

int cmd_doctor(int argc, char **argv) {
    bool json = false;
    const struct option options[] = {
        JSON_OPTION(&json),
    };
    const struct usage usage = {
        .command = "doctor",
        .summary = "this machine, its backends and memory",
        .about = "Says which backends this program can use here and why, or why not.",
        .example = "lily doctor",
        USAGE_OPTIONS(options),
    };
    int status = options_parse(&usage, argc, argv, NULL, NULL);
    if (status != OPTIONS_GO_ON) return status;
    char *text;
    lily_err err = {0};
    if (lily_doctor(&text, &err)) return fail(&err);
    json_t *doc = take_json(text, "doctor");
    if (!doc) return EXIT_FAILED;
    if (json) return print_json(doc);
    print_document(doc, NULL);
    json_decref(doc);
    return EXIT_OK;
}
