/* The expression of the file runs in PCRE2, compiled to machine code where that is possible. The
 * library's Unicode version decides about the newest characters; all others are cut alike. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "text/pretokenize.h"

#include <pcre2.h>
#include <stdlib.h>

#include "base/buf.h"

struct splitter {
    pcre2_code *code;
};

/* Oniguruma to PCRE2: \s is the White_Space property there, while PCRE2's adds U+180E, so the
 * property is named. Everything else the published expression uses means the same in both. */
static bool translate(const char *expression, size_t n, struct buf *out) {
    for (size_t i = 0; i < n; i++) {
        bool escape = expression[i] == '\\' && i + 1 < n;
        bool ok;
        if (escape && expression[i + 1] == 's') {
            ok = buf_puts(out, "\\p{White_Space}");
        } else if (escape && expression[i + 1] == 'S') {
            ok = buf_puts(out, "\\P{White_Space}");
        } else {
            ok = buf_append(out, expression + i, escape ? 2 : 1);
        }
        if (!ok) return false;
        if (escape) i++;
    }
    return true;
}

int splitter_new(const char *expression, size_t n, struct splitter **out, lily_err *err) {
    struct buf pattern = {0};
    int rc = 0, code = 0;
    PCRE2_SIZE at = 0;
    struct splitter *s = calloc(1, sizeof *s);
    if (!s || !buf_reserve(&pattern, 0) || !translate(expression, n, &pattern)) {
        rc = ERR_NOMEM(err, "split expression");
        goto out;
    }
    s->code = pcre2_compile((PCRE2_SPTR)pattern.data, pattern.len, PCRE2_UTF | PCRE2_UCP, &code,
                            &at, NULL);
    if (!s->code) {
        char why[128];
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        rc = ERR(err, LILY_EMODEL,
                 "tokenizer.json: split expression: found \"%s\" at byte %zu (as PCRE2: %s), "
                 "expected an expression that PCRE2 10.40 or later compiles",
                 why, (size_t)at, pattern.data);
        goto out;
    }
    pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE); /* where it fails the interpreter runs */
    *out = s;
    s = NULL;
out:
    splitter_free(s);
    buf_free(&pattern);
    return rc;
}

void splitter_free(struct splitter *s) {
    if (!s) return;
    pcre2_code_free(s->code);
    free(s);
}

/* What one run needs besides the expression. */
struct run {
    const struct splitter *splitter;
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack; /* NULL until the 32 KiB of the machine stack were not enough */
};

/* Matches from offset `from` on; PCRE2's codes. A long run of one class (a megabyte of spaces)
 * makes the JIT remember one position per character, so its stack grows with the text on demand;
 * should even that not do, the interpreter, which needs no such memory, takes over. */
static int match_from(struct run *run, const char *text, size_t n, size_t from) {
    const pcre2_code *code = run->splitter->code;
    PCRE2_SPTR subject = (PCRE2_SPTR)text;
    int got = pcre2_match(code, subject, n, from, PCRE2_NO_UTF_CHECK, run->match, run->context);
    if (got == PCRE2_ERROR_JIT_STACKLIMIT && !run->stack) {
        run->stack = pcre2_jit_stack_create((size_t)1 << 16, ((size_t)1 << 20) + 32 * n, NULL);
        if (!run->stack) return PCRE2_ERROR_NOMEMORY;
        pcre2_jit_stack_assign(run->context, NULL, run->stack);
        got = pcre2_match(code, subject, n, from, PCRE2_NO_UTF_CHECK, run->match, run->context);
    }
    if (got == PCRE2_ERROR_JIT_STACKLIMIT) {
        got = pcre2_match(code, subject, n, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, run->match,
                          run->context);
    }
    return got;
}

/* The matches from left to right, and the gaps between them as pieces of their own. */
static int split(struct run *run, const char *text, size_t n, splitter_fn fn, void *arg,
                 lily_err *err) {
    size_t done = 0, from = 0; /* text[done] is handed out; matches are looked for after from */
    while (from < n) {
        int got = match_from(run, text, n, from);
        if (got == PCRE2_ERROR_NOMATCH) break;
        if (got < 0) {
            char why[128];
            pcre2_get_error_message(got, (PCRE2_UCHAR *)why, sizeof why);
            return ERR(err, got == PCRE2_ERROR_NOMEMORY ? LILY_ENOMEM : LILY_EINVAL,
                       "text: the split expression failed at byte %zu: %s", from, why);
        }
        const PCRE2_SIZE *span = pcre2_get_ovector_pointer(run->match);
        int rc = 0;
        if (span[0] > done) rc = fn(arg, text + done, span[0] - done);
        if (!rc && span[1] > span[0]) rc = fn(arg, text + span[0], span[1] - span[0]);
        if (rc) return rc;
        if (span[1] > span[0]) {
            done = from = span[1];
        } else { /* an empty match cuts here: go on after the next code point */
            done = span[0];
            from = span[0] + 1;
            while (from < n && ((unsigned char)text[from] & 0xc0) == 0x80) from++;
        }
    }
    return done < n ? fn(arg, text + done, n - done) : 0;
}

int splitter_run(const struct splitter *s, const char *text, size_t n, splitter_fn fn, void *arg,
                 lily_err *err) {
    struct run run = {.splitter = s};
    int rc;
    run.match = pcre2_match_data_create_from_pattern(s->code, NULL);
    run.context = pcre2_match_context_create(NULL);
    if (!run.match || !run.context) {
        rc = ERR_NOMEM(err, "splitting text");
        goto out;
    }
    /* A bound on backtracking in proportion to the text: an expression that needs more is refused
     * instead of running for hours. */
    size_t limit = (size_t)10000000 + 64 * n;
    pcre2_set_match_limit(run.context, limit < UINT32_MAX ? (uint32_t)limit : UINT32_MAX);
    rc = split(&run, text, n, fn, arg, err);
out:
    pcre2_jit_stack_free(run.stack);
    pcre2_match_context_free(run.context);
    pcre2_match_data_free(run.match);
    return rc;
}
