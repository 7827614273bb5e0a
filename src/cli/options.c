#include "cli/options.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"

const char *program_name = "lily";

enum { HELP_COLUMN = 30, HELP_WIDTH = 80, NAMES_MAX = 64, WORD_MAX = 48 };

/* ---- numbers --------------------------------------------------------------------------------- */

/* strtoll alone would take "5x" and clamp what is too large. */
bool parse_i64(const char *text, int64_t *out) {
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || *end || errno) return false;
    *out = v;
    return true;
}

bool parse_u64(const char *text, uint64_t *out) {
    /* strtoull accepts a minus sign and wraps: only digits may begin a number here. */
    if (text[0] < '0' || text[0] > '9') return false;
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 0);
    if (*end || errno) return false;
    *out = v;
    return true;
}

/* NaN and infinity are numbers to strtod and to nobody here. */
bool parse_real(const char *text, double *out) {
    char *end;
    errno = 0;
    double v = strtod(text, &end);
    if (end == text || *end || !isfinite(v)) return false;
    *out = v;
    return true;
}

/* Powers of 1024, as memory and bodies are counted. */
bool parse_size(const char *text, size_t *out) {
    if (text[0] < '0' || text[0] > '9') return false;
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    if (errno || v > SIZE_MAX) return false;
    int shift = 0;
    if (*end == 'K' || *end == 'k') shift = 10;
    if (*end == 'M' || *end == 'm') shift = 20;
    if (*end == 'G' || *end == 'g') shift = 30;
    if (shift) end++;
    return !*end && size_mul((size_t)v, (size_t)1 << shift, out);
}

/* Blanks count as commas, so that a shell variable with a list can be passed as it is. */
bool parse_int_list(const char *text, struct int_list *out) {
    out->n = 0;
    while (*text) {
        char *end;
        errno = 0;
        long long v = strtoll(text, &end, 10);
        if (end == text || errno || v < INT32_MIN || v > INT32_MAX) return false;
        if (out->n == OPTION_LIST_MAX) return false;
        out->items[out->n++] = (int32_t)v;
        text = end + strspn(end, ", \t\r\n");
        if (text == end && *end) return false;
    }
    return out->n > 0;
}

/* ---- suggestions ----------------------------------------------------------------------------- */

static size_t least(size_t a, size_t b) {
    return a < b ? a : b;
}

/* Edit distance with insertion, deletion, substitution and the swap of neighbours. */
static size_t word_distance(const char *a, const char *b) {
    size_t na = strlen(a), nb = strlen(b);
    size_t d[3][WORD_MAX + 1];
    if (na > WORD_MAX || nb > WORD_MAX) return SIZE_MAX;
    for (size_t j = 0; j <= nb; j++) d[0][j] = j;
    for (size_t i = 1; i <= na; i++) {
        size_t *row = d[i % 3], *above = d[(i + 2) % 3], *two_above = d[(i + 1) % 3];
        row[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            size_t change = above[j - 1] + (a[i - 1] != b[j - 1]);
            row[j] = least(change, least(above[j], row[j - 1]) + 1);
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                row[j] = least(row[j], two_above[j - 2] + 1);
        }
    }
    return d[na % 3][nb];
}

/* How far off a guess may be grows with the word: two letters of "run" wrong are another word. */
const char *nearest_word(const char *word, const char *const *candidates, size_t n) {
    const char *best = NULL;
    size_t best_distance = SIZE_MAX;
    size_t length = strlen(word);
    for (size_t i = 0; i < n; i++) {
        size_t distance = word_distance(word, candidates[i]);
        /* The beginning of a longer name is near it, however much is missing. */
        if (length >= 2 && strncmp(word, candidates[i], length) == 0) distance = 1;
        if (distance < best_distance) best = candidates[i], best_distance = distance;
    }
    size_t near = length <= 4 ? 1 : length <= 7 ? 2 : 3;
    return best_distance <= near ? best : NULL;
}

/* ---- messages -------------------------------------------------------------------------------- */

/* One line and the way to the help, not the help itself, which would push the message away. */
int usage_error(const char *command, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    fputs("lily: ", stderr);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fprintf(stderr, "; see %s%s%s --help\n", program_name, command ? " " : "",
            command ? command : "");
    return EXIT_USAGE;
}

/* shown is the option as typed, name its part without dashes (empty: nothing to guess from). */
static int unknown_option(const struct usage *u, const char *shown, const char *name) {
    const char *names[NAMES_MAX] = {"help"};
    size_t n = 1;
    for (size_t i = 0; i < u->n_options && n < NAMES_MAX; i++)
        if (u->options[i].kind != OPTION_GROUP) names[n++] = u->options[i].name;
    const char *near = nearest_word(name, names, n);
    if (near) return usage_error(u->command, "%s: no such option; did you mean --%s?", shown, near);
    return usage_error(u->command, "%s: no such option", shown);
}

/* Column of the last printed character is tracked so that words wrap under the help column. */
static void print_wrapped(const char *text, int column, int indent) {
    while (*text) {
        size_t word = strcspn(text, " ");
        if (column > indent && column + 1 + (int)word > HELP_WIDTH) {
            printf("\n%*s", indent, "");
            column = indent;
        } else if (column > indent) {
            putchar(' '), column++;
        }
        printf("%.*s", (int)word, text);
        column += (int)word;
        text += word;
        text += strspn(text, " ");
    }
    putchar('\n');
}

/* As --max-body takes it: 33554432 is 32M. */
static void format_size(char *out, size_t room, size_t v) {
    const char *suffix = "";
    if (v && v % ((size_t)1 << 20) == 0) v >>= 20, suffix = "M";
    snprintf(out, room, "%zu%s", v, suffix);
}

/* The default as the user would type it; empty when there is none to show. */
static void format_default(const struct option *o, char *out, size_t room) {
    out[0] = 0;
    if (o->given) return;
    if (o->kind == OPTION_INT) snprintf(out, room, "%d", (int)*(const int32_t *)o->value);
    if (o->kind == OPTION_U64)
        snprintf(out, room, "%llu", (unsigned long long)*(const uint64_t *)o->value);
    if (o->kind == OPTION_REAL) snprintf(out, room, "%g", (double)*(const float *)o->value);
    if (o->kind == OPTION_SIZE) format_size(out, room, *(const size_t *)o->value);
    const bool text = o->kind == OPTION_TEXT || o->kind == OPTION_NAME;
    if (text && *(const char *const *)o->value)
        snprintf(out, room, "%s", *(const char *const *)o->value);
    if (o->kind == OPTION_INTS) {
        const struct int_list *list = o->value;
        size_t used = 0;
        for (size_t i = 0; i < list->n && used < room; i++)
            used += (size_t)snprintf(out + used, room - used, "%s%d", i ? "," : "",
                                     (int)list->items[i]);
    }
}

/* A name too long for its column gets a line of its own. */
static void print_option(const struct option *o) {
    char value[64], help[512];
    int column = 0;
    if (o->letter)
        column += printf("  -%c, --%s", o->letter, o->name);
    else
        column += printf("      --%s", o->name);
    if (o->arg) column += printf(" %s", o->arg);
    if (column > HELP_COLUMN - 2) column = 0, putchar('\n');
    printf("%*s", HELP_COLUMN - column, "");
    format_default(o, value, sizeof value);
    if (value[0])
        snprintf(help, sizeof help, "%s (default: %s)", o->help, value);
    else
        snprintf(help, sizeof help, "%s", o->help);
    print_wrapped(help, HELP_COLUMN, HELP_COLUMN);
}

/* Made from the table that parses, so that it cannot promise what is not taken. */
static void print_help(const struct usage *u) {
    printf("%s %s: %s\n\nusage: %s %s [options]%s%s\n", program_name, u->command, u->summary,
           program_name, u->command, u->operands ? " " : "", u->operands ? u->operands : "");
    if (u->about) putchar('\n'), print_wrapped(u->about, 0, 0);
    if (u->n_options && u->options[0].kind != OPTION_GROUP) puts("\noptions:");
    for (size_t i = 0; i < u->n_options; i++) {
        if (u->options[i].kind == OPTION_GROUP)
            printf("\n%s:\n", u->options[i].name);
        else
            print_option(&u->options[i]);
    }
    static const struct option help = {
        .kind = OPTION_FLAG, .name = "help", .letter = 'h', .help = "this text"};
    print_option(&help);
    printf("\nexample:\n  %s\n", u->example);
}

/* ---- parsing --------------------------------------------------------------------------------- */

/* Without a range of its own an option takes what is not negative. */
static bool in_range(const struct option *o, double v) {
    if (o->min == 0 && o->max == 0) return v >= 0;
    return v >= o->min && v <= o->max;
}

/* wanted: "an integer", "a number", "integers". */
static int range_error(const struct usage *u, const struct option *o, const char *text,
                       const char *wanted) {
    if (o->min == 0 && o->max == 0)
        return usage_error(u->command, "--%s: found \"%s\", expected %s of 0 or more", o->name,
                           text, wanted);
    return usage_error(u->command, "--%s: found \"%s\", expected %s from %.10g to %.10g", o->name,
                       text, wanted, o->min, o->max);
}

/* Checked as a whole before it is stored: the error names the list as it was typed. */
static int set_ints(const struct usage *u, const struct option *o, const char *text) {
    struct int_list list;
    if (!parse_int_list(text, &list))
        return usage_error(u->command,
                           "--%s: found \"%s\", expected up to %d integers divided by commas",
                           o->name, text, OPTION_LIST_MAX);
    for (size_t i = 0; i < list.n; i++)
        if (!in_range(o, list.items[i])) return range_error(u, o, text, "integers");
    *(struct int_list *)o->value = list;
    return OPTIONS_GO_ON;
}

static int set_texts(const struct usage *u, const struct option *o, const char *text) {
    struct text_list *list = o->value;
    if (list->n == OPTION_LIST_MAX)
        return usage_error(u->command, "--%s: given more than %d times", o->name, OPTION_LIST_MAX);
    list->items[list->n++] = text;
    return OPTIONS_GO_ON;
}

/* Stores text, checked, where the option says. */
static int set_value(const struct usage *u, const struct option *o, const char *text) {
    int64_t i;
    double d;
    if (o->given) *o->given = true;
    switch (o->kind) {
    case OPTION_GROUP:
    case OPTION_FLAG:
        break;
    case OPTION_NAME: /* an empty one is a script's unset variable, not a wish for the default */
        if (!*text)
            return usage_error(u->command, "--%s: found \"\", expected %s", o->name, o->arg);
        *(const char **)o->value = text;
        break;
    case OPTION_TEXT:
        *(const char **)o->value = text;
        break;
    case OPTION_TEXTS:
        return set_texts(u, o, text);
    case OPTION_INT:
        if (!parse_i64(text, &i) || i < INT32_MIN || i > INT32_MAX || !in_range(o, (double)i))
            return range_error(u, o, text, "an integer");
        *(int32_t *)o->value = (int32_t)i;
        break;
    case OPTION_INTS:
        return set_ints(u, o, text);
    case OPTION_U64:
        if (!parse_u64(text, o->value))
            return usage_error(u->command, "--%s: found \"%s\", expected an unsigned integer",
                               o->name, text);
        break;
    case OPTION_SIZE:
        if (!parse_size(text, o->value) || *(size_t *)o->value == 0)
            return usage_error(u->command,
                               "--%s: found \"%s\", expected a size such as 65536, 64K or 32M",
                               o->name, text);
        break;
    case OPTION_REAL:
        if (!parse_real(text, &d) || !in_range(o, d)) return range_error(u, o, text, "a number");
        *(float *)o->value = (float)d;
        break;
    }
    return OPTIONS_GO_ON;
}

/* name[n] is a long name, or letter a short one. NULL: none such. */
static const struct option *find_option(const struct usage *u, const char *name, size_t n,
                                        char letter) {
    for (size_t i = 0; i < u->n_options; i++) {
        const struct option *o = &u->options[i];
        if (o->kind == OPTION_GROUP) continue;
        if (name && strncmp(o->name, name, n) == 0 && !o->name[n]) return o;
        if (!name && o->letter && o->letter == letter) return o;
    }
    return NULL;
}

/* The option at argv[*at]; *at moves to the last word used. "--x=v", "--x v", "-xv", "-x v". */
static int take_option(const struct usage *u, int argc, char **argv, int *at) {
    char shown[WORD_MAX + 8];
    const char *word = argv[*at], *attached = NULL;
    const struct option *o;
    if (word[1] == '-') {
        size_t n = strcspn(word + 2, "=");
        if (word[2 + n]) attached = word + 2 + n + 1;
        /* Whole names only: an abbreviation would change its meaning with the next option added. */
        o = find_option(u, word + 2, n, 0);
        snprintf(shown, sizeof shown, "%.*s", (int)(n > WORD_MAX ? WORD_MAX : n) + 2, word);
    } else {
        if (word[2]) attached = word + 2;
        o = find_option(u, NULL, 0, word[1]);
        snprintf(shown, sizeof shown, "-%c", word[1]);
    }
    if (!o) return unknown_option(u, shown, word[1] == '-' ? shown + 2 : "");
    if (o->kind == OPTION_FLAG) {
        if (attached)
            return usage_error(u->command, "%s: found a value \"%s\", expected none", shown,
                               attached);
        if (o->given) *o->given = true;
        *(bool *)o->value = true;
        return OPTIONS_GO_ON;
    }
    if (!attached && *at + 1 >= argc)
        return usage_error(u->command, "%s: expected a value (%s)", shown, o->arg);
    /* The next word is the value even if it begins with a dash: negative numbers, "-" for input. */
    return set_value(u, o, attached ? attached : argv[++*at]);
}

/* Of every command, so it is in no table. */
static bool is_help(const char *word) {
    return strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
}

int options_parse(const struct usage *u, int argc, char **argv, const char **operands,
                  int *n_operands) {
    bool options_ended = false;
    int n = 0;
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        /* A single dash is an operand: standard input. */
        if (options_ended || word[0] != '-' || !word[1]) {
            if (n == u->max_operands)
                return usage_error(u->command, "found an unexpected \"%s\"%s", word,
                                   u->max_operands ? "; quote text with spaces" : "");
            if (u->named_operands && !*word)
                return usage_error(u->command, "found \"\", expected %s", u->operands);
            operands[n++] = word;
        } else if (strcmp(word, "--") == 0) {
            options_ended = true;
        } else if (is_help(word)) {
            print_help(u);
            return EXIT_OK;
        } else {
            int status = take_option(u, argc, argv, &i);
            if (status != OPTIONS_GO_ON) return status;
        }
    }
    if (n < u->min_operands)
        return usage_error(u->command, "found %d operands, expected %s", n, u->operands);
    if (n_operands) *n_operands = n;
    return OPTIONS_GO_ON;
}
