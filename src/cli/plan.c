/* lily plan: what a step costs by a backend's own recording of it. */
#include "cli/command.h"
#include "cli/document.h"
#include "cli/options.h"
#include "cli/output.h"
#include "lily.h"

int cmd_plan(int argc, char **argv) {
    bool json = false;
    lily_plan_options o = {.shape = "qwen3.6-35b-a3b"};
    struct int_list depths = {0}, tokens = {0}, sessions = {0};
    const struct option options[] = {
        OPT(NAME, "backend", 0, &o.backend, "NAME", "whose steps: metal, cuda"),
        OPT(NAME, "model-shape", 0, &o.shape, "NAME", "qwen3.6-35b-a3b or mini"),
        OPT_RANGE(INT, "layers", &o.layers, "N", 0, 1024,
                  "a multiple of 4; 0: all layers of the shape"),
        OPT_RANGE(INTS, "depth", &depths, "LIST", 0, 1 << 24,
                  "tokens already in the KV cache; without it 0,4096,32768,131072"),
        OPT_RANGE(INTS, "tokens", &tokens, "LIST", 1, 1 << 24,
                  "1: a decoded token, more: a chunk of a prompt; without it 1, and without "
                  "--depth too a chunk of 512 at depth 0"),
        OPT_RANGE(INTS, "sessions", &sessions, "LIST", 1, 1024,
                  "sessions that decode a token each in one step, where a backend can (cuda)"),
        JSON_OPTION(&json),
    };
    const struct usage usage = {
        .command = "plan",
        .summary = "what a step costs on a backend: kernels, stages, bytes",
        .about = "Counts the kernels, the barriers and the bytes of a step as the backend records "
                 "it, beside the least bytes it could read. Needs neither the device nor a "
                 "checkpoint.",
        .example = "lily plan --backend metal",
        USAGE_OPTIONS(options),
    };
    int status = options_parse(&usage, argc, argv, NULL, NULL);
    if (status != OPTIONS_GO_ON) return status;
    if (!o.backend) return usage_error("plan", "give --backend NAME");
    if (o.layers % 4)
        return usage_error("plan", "--layers: found %d, expected a multiple of 4", (int)o.layers);
    o.depths = depths.items, o.n_depths = depths.n;
    o.tokens = tokens.items, o.n_tokens = tokens.n;
    o.sessions = sessions.items, o.n_sessions = sessions.n;
    char *text;
    lily_err err = {0};
    if (lily_plan(&o, &text, &err)) return fail(&err);
    json_t *doc = take_json(text, "plan");
    if (!doc) return EXIT_FAILED;
    if (json) return print_json(doc);
    print_document(doc, NULL);
    json_decref(doc);
    return EXIT_OK;
}
