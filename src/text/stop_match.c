#include "text/stop_match.h"

#include <stdlib.h>
#include <string.h>

#include "text/utf8.h"

/* One Knuth-Morris-Pratt automaton. */
struct stop_string {
    char *text;
    size_t *fallback; /* [len + 1] length of the longest proper border of each prefix */
    size_t len;
    size_t matched; /* bytes of text that the input now ends with */
};

static int string_init(struct stop_string *s, const char *text, lily_err *err) {
    s->len = strlen(text);
    s->text = strdup(text);
    s->fallback = calloc(s->len + 1, sizeof *s->fallback);
    if (!s->text || !s->fallback) return ERR_NOMEM(err, "stop strings");
    for (size_t i = 1, k = 0; i < s->len; i++) {
        while (k > 0 && text[i] != text[k]) k = s->fallback[k];
        if (text[i] == text[k]) k++;
        s->fallback[i + 1] = k;
    }
    return 0;
}

int stop_match_init(struct stop_match *m, const char *const *stops, size_t n, lily_err *err) {
    *m = (struct stop_match){.strings = calloc(n + 1, sizeof *m->strings)};
    if (!m->strings) return ERR_NOMEM(err, "stop strings");
    for (size_t i = 0; i < n; i++) {
        if (!*stops[i]) continue;
        int rc = 0;
        if (utf8_invalid_at(stops[i], strlen(stops[i])) < strlen(stops[i])) {
            rc = ERR(err, LILY_EINVAL, "stop string %zu: found invalid UTF-8, expected UTF-8", i);
        }
        if (!rc) rc = string_init(&m->strings[m->n++], stops[i], err);
        if (rc) {
            stop_match_free(m);
            return rc;
        }
    }
    return 0;
}

void stop_match_free(struct stop_match *m) {
    for (size_t i = 0; i < m->n; i++) {
        free(m->strings[i].text);
        free(m->strings[i].fallback);
    }
    free(m->strings);
    *m = (struct stop_match){0};
}

size_t stop_match_feed(struct stop_match *m, char c) {
    size_t longest = 0;
    for (size_t i = 0; i < m->n; i++) {
        struct stop_string *s = &m->strings[i];
        while (s->matched > 0 && s->text[s->matched] != c) s->matched = s->fallback[s->matched];
        if (s->text[s->matched] == c) s->matched++;
        if (s->matched < s->len) continue;
        if (s->len > longest) longest = s->len;
        s->matched = s->fallback[s->len];
    }
    return longest;
}

size_t stop_match_held(const struct stop_match *m) {
    size_t held = 0;
    for (size_t i = 0; i < m->n; i++) {
        if (m->strings[i].matched > held) held = m->strings[i].matched;
    }
    return held;
}

void stop_match_reset(struct stop_match *m) {
    for (size_t i = 0; i < m->n; i++) m->strings[i].matched = 0;
}
