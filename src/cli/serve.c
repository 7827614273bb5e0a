/* lily serve: the HTTP server over one engine. */
#include "serve/serve.h"

#include <string.h>

#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/output.h"

struct serve_work {
    struct serve_options server;
    struct model_options model;
    lily_engine *engine;
};

/* The server is bound: one line (or document) that a person or a script can wait for. The warning
 * comes before it, and only now: what a name such as "localhost" stands for is known once bound. */
static void print_ready(void *arg, uint16_t port, bool local) {
    struct serve_work *w = arg;
    if (!local)
        fprintf(stderr,
                "lily: %s is reachable from other machines and there is no authentication\n",
                w->server.host);
    lily_engine_info info;
    char url[300];
    /* An address with colons stands in brackets in a URL. */
    const bool v6 = strchr(w->server.host, ':') != NULL;
    snprintf(url, sizeof url, "http://%s%s%s:%u", v6 ? "[" : "", w->server.host, v6 ? "]" : "",
             (unsigned)port);
    lily_engine_get_info(w->engine, &info);
    const char *name = w->server.model_alias ? w->server.model_alias : info.model_name;
    if (w->model.json) {
        print_json(json_pack("{s:s, s:i, s:s, s:o}", "url", url, "port", (int)port, "model", name,
                             "engine", engine_json(w->engine)));
    } else {
        printf("%s serves %s (%s, context %d); Ctrl-C ends it\n", url, name, info.backend,
               (int)info.context);
    }
    output_flush(); /* a script waits for this line through a pipe */
}

/* The options keep their own defaults, although serve_run has the same for zeros: the help shows
 * them. */
int cmd_serve(int argc, char **argv) {
    struct serve_work w = {.model = MODEL_DEFAULTS};
    int32_t port = 8080;
    struct serve_options *s = &w.server;
    *s = (struct serve_options){.host = "127.0.0.1",
                                .max_body = 32 << 20,
                                .max_queue = 64,
                                .max_connections = 256,
                                .idle_seconds = 60,
                                .keepalive_seconds = 5};
    const struct option options[] = {
        OPT(NAME, "host", 0, &s->host, "ADDR", "address to listen on"),
        OPT_RANGE(INT, "port", &port, "N", 0, 65535, "port; 0: any free one, printed"),
        OPT(NAME, "alias", 0, &s->model_alias, "NAME", "model name to show to clients"),
        OPT(SIZE, "max-body", 0, &s->max_body, "SIZE", "largest request body"),
        OPT_RANGE(INT, "queue", &s->max_queue, "N", 1, 1 << 20,
                  "requests that may wait; more are answered 503"),
        OPT_RANGE(INT, "connections", &s->max_connections, "N", 1, 1 << 20, "open connections"),
        OPT_RANGE(INT, "idle", &s->idle_seconds, "S", 1, 86400,
                  "seconds after which a silent connection is closed"),
        OPT_RANGE(INT, "keepalive", &s->keepalive_seconds, "S", 1, 3600,
                  "seconds between comments on a silent stream"),
        OPT_FLAG("quiet", 'q', &s->quiet, "no line per request on standard error"),
        MODEL_OPTIONS(&w.model),
        JSON_OPTION(&w.model.json),
    };
    const struct usage usage = {
        .command = "serve",
        .summary = "serve OpenAI's chat API over HTTP",
        .about = "Prints its URL when it is ready. There is no authentication: whoever reaches the "
                 "port can use the model, so the default listens on this machine only.",
        .example = "lily serve -m Qwen3.6-35B-A3B-4bit --port 8080",
        USAGE_OPTIONS(options),
    };
    int status = options_parse(&usage, argc, argv, NULL, NULL);
    if (status != OPTIONS_GO_ON) return status;
    s->port = (uint16_t)port;
    lily_err err = {0};
    int rc = model_open(&w.model, 0, &w.engine, &err);
    if (!rc) rc = serve_run(w.engine, s, print_ready, &w, &err);
    lily_engine_close(w.engine);
    return rc ? fail(&err) : EXIT_OK;
}
