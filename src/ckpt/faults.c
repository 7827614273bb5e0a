#include "ckpt/faults.h"

#include <stdarg.h>
#include <stdio.h>

int fault_from(struct faults *f, int code, const lily_err *err) {
    if (!f->list) {
        if (f->err && f->err != err) *f->err = *err;
        return code;
    }
    if (f->total++ < FAULTS_LISTED) json_array_append_new(f->list, json_string_nocheck(err->msg));
    return 0;
}

int fault(struct faults *f, int code, const char *fmt, ...) {
    lily_err e = {.code = code};
    va_list args;
    va_start(args, fmt);
    vsnprintf(e.msg, sizeof e.msg, fmt, args);
    va_end(args);
    err_clean(e.msg);
    return fault_from(f, code, &e);
}

void fault_warn(struct faults *f, const char *fmt, ...) {
    if (!f->warn) return;
    char line[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    err_clean(line);
    f->warn(f->warn_arg, line);
}
