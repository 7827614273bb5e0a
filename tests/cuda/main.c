/* cuda-check: the CUDA backend against ref or the CPU backend.
 *
 *   cuda-check [-m checkpoint | --synth layers] [--against ref|cpu] [--context n] [--json file]
 *              [--capability tens] [group ...]
 *   cuda-check --hold bytes
 *
 * --synth writes a random checkpoint of the real shape to /tmp first and removes it. Groups, of
 * which all up to depth run when none is named: selftest stages logits cuts states batch company
 * sampling greedy depth; kinds (each kind of step once, for slow tools), long (100,000 tokens),
 * speed, batches, sweep, profile (kernels timed one by one), steps (for a profiler). Exit status 1
 * when a check failed. --hold fills the card's memory but for so many bytes until standard input
 * ends;
 * --capability 80 takes the card for an 8.0 (older.c). tests/cuda/run.sh runs it all on a card;
 * built with tests/cuda/emulator it runs the portable kernels on a processor. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/cuda/driver.h"
#include "base/clock.h"
#include "check.h"

enum { MOST_ROWS = 400 };
static const char GOAL_DEVICE[] = "NVIDIA H200"; /* and all layers of the large shape */
static struct {
    char what[96];
    double value, limit; /* of a check at most, of a measurement a goal at least */
    const char *unit;    /* NULL: a check */
    bool good;
} rows[MOST_ROWS];
static int n_rows, n_failed, n_missed;
static bool goals; /* this is what they were set for */

static void add(const char *what, double value, double limit, const char *unit, bool good) {
    if (n_rows == MOST_ROWS) return;
    snprintf(rows[n_rows].what, sizeof rows[n_rows].what, "%s", what);
    rows[n_rows].value = value;
    rows[n_rows].limit = limit;
    rows[n_rows].unit = unit;
    rows[n_rows++].good = good;
}

void note(const char *what, double value, double limit) {
    bool good = value <= limit; /* false for NaN */
    if (!good) n_failed++;
    printf("  %-70s %12.4g  (at most %.4g)%s\n", what, value, limit, good ? "" : "  FAILED");
    fflush(stdout);
    add(what, value, limit, NULL, good);
}

void reach(const char *what, double value, const char *unit, double goal) {
    bool good = !goals || value >= goal;
    if (!good) n_missed++;
    printf("  %-40s %12.2f %s", what, value, unit);
    if (goals && goal > 0) printf("  (goal %g%s)", goal, good ? "" : ", MISSED");
    printf("\n");
    fflush(stdout);
    add(what, value, goals ? goal : 0, unit, good);
}

void record(const char *what, double value, const char *unit) {
    reach(what, value, unit, 0);
}

void note_error(const char *what, int rc, const lily_err *err) {
    printf("  %s: error %d: %s\n", what, rc, err->msg);
    note(what, NAN, 0);
}

int report(const char *json_path, const char *device) {
    printf("\n%d rows, %d checks failed, %d goals missed\n", n_rows, n_failed, n_missed);
    for (int i = 0; i < n_rows; i++) {
        if (rows[i].good) continue;
        printf("  %s %s: %g, at %s %g\n", rows[i].unit ? "MISSED" : "FAILED", rows[i].what,
               rows[i].value, rows[i].unit ? "least" : "most", rows[i].limit);
    }
    FILE *f = json_path ? fopen(json_path, "w") : NULL;
    if (!f) return n_failed;
    fprintf(f, "{\"device\": \"%s\", \"failed\": %d, \"missed\": %d, \"rows\": [", device, n_failed,
            n_missed);
    for (int i = 0; i < n_rows; i++) {
        fprintf(f, "%s\n  {\"what\": \"%s\", ", i ? "," : "", rows[i].what);
        if (isfinite(rows[i].value)) fprintf(f, "\"value\": %.6g, ", rows[i].value);
        if (rows[i].unit) fprintf(f, "\"unit\": \"%s\"", rows[i].unit);
        if (!rows[i].unit || rows[i].limit > 0) {
            fprintf(f, "%s\"%s\": %.6g, \"good\": %s", rows[i].unit ? ", " : "",
                    rows[i].unit ? "goal" : "limit", rows[i].limit,
                    rows[i].good ? "true" : "false");
        }
        fputs("}", f);
    }
    fprintf(f, "\n]}\n");
    fclose(f);
    return n_failed;
}

/* Whether the group was named; with `usual`, also when none was. */
static bool asked(int argc, char **argv, int first, const char *group, bool usual) {
    if (first == argc) return usual;
    for (int i = first; i < argc; i++) {
        if (strcmp(argv[i], group) == 0) return true;
    }
    return false;
}

#ifdef CUDA_EMULATED
extern int emulated_capability; /* tests/cuda/emulator */
#endif

/* Checks that were asked for, in sizes that suit the model and the card. */
static void check(const struct bench_model *b, int argc, char **argv, int first) {
    static const int32_t few[] = {1, 9, 70};
    static const int32_t some[] = {1, 2, 9, 17, 65, 129, 300, 1000, 2049, 4097, 5000};
    static const int32_t many[] = {1,  2,  3,  7,   8,   9,   15,  16,  17,  31,  33,
                                   63, 64, 65, 127, 129, 200, 255, 300, 513, 1000};
    bool small = b->emulated, large = b->vocab > 100000;
#define ASKED(group) asked(argc, argv, first, group, true)
    if (ASKED("stages")) {
        check_stages(b, small ? 18 : 100, false);
        check_stages(b, small ? 4 : 12, true);
    }
    if (ASKED("logits")) {
        struct bench_model deep = *b;
        const int32_t *lengths = small ? few : large ? some : many;
        size_t bytes = small ? sizeof few : large ? sizeof some : sizeof many;
        if (large) deep.context = 5056;
        check_logits(&deep, lengths, (int32_t)(bytes / sizeof *lengths));
    }
    if (ASKED("cuts")) check_cuts(b, !small ? 700 : b->pieces ? 70 : 40);
    if (ASKED("states")) check_states(b, small ? 10 : 200);
    if (ASKED("batch")) check_batch(b, small ? 5 : 8, small ? 1 : 8);
    if (ASKED("company")) check_compositions(b, small ? 18 : 32);
    if (ASKED("sampling")) check_sampling(b, small ? 3 : 48, !large);
    if (asked(argc, argv, first, "greedy", !small))
        check_greedy(b, small ? 6 : large ? 100 : 1000, small ? 4 : 32);
    if (asked(argc, argv, first, "depth", large)) check_depth(b, 20000);
    if (asked(argc, argv, first, "selftest", false)) check_selftest(b);
#undef ASKED
}

static void run(const struct bench_model *b, int argc, char **argv, int first) {
    check(b, argc, argv, first);
#define ASKED(group) asked(argc, argv, first, group, false)
    if (ASKED("kinds")) check_kinds(b);
    if (ASKED("long")) {
        /* One session of the stand-in runs 100 small kernels a token: fewer of them. */
        check_long_run(b, b->emulated ? 40 : b->trained ? 10000 : 100000, 1);
        check_long_run(b, b->emulated ? 40 : 100000, b->emulated ? 4 : 32);
    }
    if (b->emulated) return;
    if (ASKED("speed")) measure(b);
    if (ASKED("batches")) measure_batches(b);
    if (ASKED("sweep")) measure_sweep(b);
    if (ASKED("profile")) profile(b);
    if (ASKED("steps")) steps_for_profiler(b);
#undef ASKED
}

int main(int argc, char **argv) {
    const char *path = NULL, *json = NULL, *against = "ref";
    int32_t layers = 0;
    int first = 1, capability = 0;
    struct bench_model b = {.context = 2048};
    for (; first + 1 < argc && argv[first][0] == '-'; first += 2) {
        const char *value = argv[first + 1];
        if (strcmp(argv[first], "-m") == 0) path = value;
        if (strcmp(argv[first], "--against") == 0) against = value;
        if (strcmp(argv[first], "--context") == 0) b.context = (int32_t)strtol(value, NULL, 10);
        if (strcmp(argv[first], "--json") == 0) json = value;
        if (strcmp(argv[first], "--hold") == 0) return hold_memory(strtod(value, NULL)), 0;
        if (strcmp(argv[first], "--synth") == 0) layers = (int32_t)strtol(value, NULL, 10);
        if (strcmp(argv[first], "--capability") == 0) capability = atoi(value);
    }
    lily_err err = {0};
#ifdef CUDA_EMULATED
    if (capability) emulated_capability = capability;
    b.emulated = true;
    b.context = 256;
    if (!cuda_driver_open_from(NULL, &err)) {
        fprintf(stderr, "emulated card: %s\n", err.msg);
        return 1;
    }
#else
    if (capability && pretend_capability(capability, &err) != LILY_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
#endif
    struct backend_probe probe;
    backend_cuda.probe(&probe);
    printf("device: %s (%s)\n", probe.device, probe.reason);
    if (!probe.usable) return 1;
    struct ckpt *ckpt = NULL;
    char made[64] = "";
    int rc = 0;
    if (layers) {
        const struct ckpt_synth_options o = {
            .shape = "qwen3.6-35b-a3b", .layers = layers, .packed = true};
        snprintf(made, sizeof made, "/tmp/cuda-check-%ld.lily", (long)getpid());
        rc = ckpt_synth(made, &o, &err);
        path = made;
    }
    if (!rc) rc = ckpt_load(path, &(struct ckpt_options){0}, &ckpt, &err);
    if (made[0]) unlink(made); /* what is mapped stays */
    if (rc) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    b.ckpt = ckpt;
    b.trained = !path; /* the stand-in inside the program */
    b.w = ckpt_weights(ckpt);
#ifdef CUDA_EMULATED
    const struct weights *own = emulated_weights();
    if (own) b.w = own, b.trained = false;
    b.pieces = own != NULL;
#endif
    b.vocab = b.w->shape->vocab;
    if (b.vocab > 100000) b.pieces = true;
    b.cuda = &backend_cuda;
    b.truth = strcmp(against, "cpu") == 0 ? &backend_cpu : &backend_ref;
    b.truth_name = against;
    goals = strncmp(probe.device, GOAL_DEVICE, strlen(GOAL_DEVICE)) == 0 && b.vocab > 100000 &&
            b.w->layers == b.w->shape->layers;
    printf("checkpoint: %s, %d layers, against %s\n", b.w->shape->name, b.w->layers, against);
    int64_t began = clock_ns();
    run(&b, argc, argv, first);
    int failed = report(json, probe.device);
    printf("%.1f s\n", (double)(clock_ns() - began) * 1e-9);
    ckpt_free(ckpt);
    return failed != 0;
}
