#include "base/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"

enum { BAR_CELLS = 24 };

void progress_start(struct progress *p, const char *label, const char *unit) {
    *p = (struct progress){.label = label,
                           .unit = unit,
                           .started_ns = clock_ns(),
                           .watched = isatty(STDERR_FILENO) != 0};
}

static void format_amount(char *out, size_t room, double amount, const char *unit) {
    if (strcmp(unit, "B") == 0) {
        const char *prefix[] = {"B", "KiB", "MiB", "GiB", "TiB"};
        int k = 0;
        while (amount >= 1024 && k < 4) amount /= 1024, k++;
        snprintf(out, room, "%.*f %s", k ? 1 : 0, amount, prefix[k]);
    } else {
        snprintf(out, room, "%.0f %s", amount, unit);
    }
}

void progress_update(struct progress *p, uint64_t done, uint64_t total) {
    int64_t now = clock_ns();
    /* Nothing is drawn in the first 0.3 s: short work should not flicker. */
    if (!p->watched || now - p->started_ns < 300000000 || now - p->drawn_ns < 100000000) return;
    p->drawn_ns = now;
    p->drawn = true;
    double seconds = (double)(now - p->started_ns) * 1e-9;
    char amount[32], rate[32], bar[BAR_CELLS + 1];
    format_amount(amount, sizeof amount, (double)done, p->unit);
    format_amount(rate, sizeof rate, (double)done / seconds, p->unit);
    if (total == 0) {
        fprintf(stderr, "\r\033[K%s %s  %s/s", p->label, amount, rate);
    } else {
        double share = done < total ? (double)done / (double)total : 1.0;
        int full = (int)(share * BAR_CELLS);
        for (int i = 0; i < BAR_CELLS; i++) bar[i] = i < full ? '#' : '.';
        bar[BAR_CELLS] = 0;
        fprintf(stderr, "\r\033[K%s [%s] %3.0f%%  %s  %s/s", p->label, bar, share * 100, amount,
                rate);
    }
    fflush(stderr);
}

void progress_end(struct progress *p) {
    if (p->drawn) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
    p->drawn = false;
}
