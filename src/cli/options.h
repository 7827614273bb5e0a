/* Command-line options as tables: each command lists what it takes, where the values go and what
 * the help says; parsing, range checks, defaults in the help and suggestions live here once. */
#ifndef LILY_CLI_OPTIONS_H
#define LILY_CLI_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { OPTION_LIST_MAX = 64 }; /* values of one option or comma-separated list */

/* A value of OPTION_TEXTS: every use of the option adds one. Points into argv. */
struct text_list {
    const char *items[OPTION_LIST_MAX];
    size_t n;
};
/* A value of OPTION_INTS: "512,2048". */
struct int_list {
    int32_t items[OPTION_LIST_MAX];
    size_t n;
};

/* kind, type behind option.value */
enum option_kind {
    OPTION_GROUP, /* no option: a heading in the help */
    OPTION_FLAG,  /* bool */
    OPTION_TEXT,  /* const char *, into argv */
    OPTION_NAME,  /* the same, of a file or a thing: not empty */
    OPTION_TEXTS, /* struct text_list */
    OPTION_INT,   /* int32_t in [min, max] */
    OPTION_INTS,  /* struct int_list, each in [min, max] */
    OPTION_U64,   /* uint64_t, any */
    OPTION_SIZE,  /* size_t, at least 1, with an optional K, M or G (powers of 1024) */
    OPTION_REAL,  /* float in [min, max] */
};

struct option {
    enum option_kind kind;
    const char *name; /* long name without dashes; of a group: its heading */
    char letter;      /* short name or 0 */
    void *value;      /* holds the default when parsing begins */
    const char *arg;  /* how the help names the value */
    const char *help;
    double min, max; /* both 0: any non-negative number */
    bool *given;     /* NULL, or set when the option is used (the help then shows no default) */
};

/* Table entries: kind is the part after OPTION_. */
#define OPT_GROUP(heading)                                                                         \
    { .kind = OPTION_GROUP, .name = (heading) }
#define OPT_FLAG(long_name, short_name, v, h)                                                      \
    { .kind = OPTION_FLAG, .name = (long_name), .letter = (short_name), .value = (v), .help = (h) }
#define OPT(k, long_name, short_name, v, a, h)                                                     \
    {                                                                                              \
        .kind = OPTION_##k, .name = (long_name), .letter = (short_name), .value = (v), .arg = (a), \
        .help = (h)                                                                                \
    }
#define OPT_RANGE(k, long_name, v, a, lo, hi, h)                                                   \
    {                                                                                              \
        .kind = OPTION_##k, .name = (long_name), .value = (v), .arg = (a), .help = (h),            \
        .min = (lo), .max = (hi)                                                                   \
    }
#define OPT_GIVEN(k, long_name, v, a, lo, hi, g, h)                                                \
    {                                                                                              \
        .kind = OPTION_##k, .name = (long_name), .value = (v), .arg = (a), .help = (h),            \
        .min = (lo), .max = (hi), .given = (g)                                                     \
    }

#define JSON_OPTION(v) OPT_FLAG("json", 0, v, "one JSON document on standard output")

struct usage {
    const char *command;
    const char *operands; /* "[PROMPT]"; NULL: none */
    const char *summary;
    const char *about; /* a paragraph, NULL: none */
    const char *example;
    const struct option *options; /* [n_options] */
    size_t n_options;
    int min_operands, max_operands;
    bool named_operands; /* they are names like those of OPTION_NAME */
};
#define USAGE_OPTIONS(table) .options = (table), .n_options = sizeof(table) / sizeof *(table)

/* Exit statuses of every command. An interrupted one ends with 128 + the signal, as shells do. */
enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };
/* options_parse: nothing was printed, the command goes on. */
enum { OPTIONS_GO_ON = -1 };

/* The program's name in usage lines ("lily", "lily-core"); set once by cli_main. */
extern const char *program_name;

/* Reads argv[1..argc) into the table's values and operands[max_operands]. Returns OPTIONS_GO_ON, or
 * the exit status after the help (EXIT_OK) or an error message (EXIT_USAGE) was printed. */
int options_parse(const struct usage *usage, int argc, char **argv, const char **operands,
                  int *n_operands);

/* "lily: <message>; see lily COMMAND --help" on stderr; returns EXIT_USAGE. */
int usage_error(const char *command, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* The candidate that word was probably meant to be, or NULL when none is near. */
const char *nearest_word(const char *word, const char *const *candidates, size_t n);

/* Strict numbers: all of text, in range. */
bool parse_i64(const char *text, int64_t *out);
bool parse_u64(const char *text, uint64_t *out);
bool parse_real(const char *text, double *out); /* finite */
bool parse_size(const char *text, size_t *out);
/* Integers divided by commas or whitespace, at most max of them; false: not that. */
bool parse_int_list(const char *text, struct int_list *out);

#endif
