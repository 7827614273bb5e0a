#include "base/err.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *lily_strerror(int code) {
    switch (code) {
    case LILY_OK:
        return "success";
#define ERROR_TEXT(name, value, text)                                                              \
    case name:                                                                                     \
        return text;
        LILY_ERROR_MAP(ERROR_TEXT)
#undef ERROR_TEXT
    default:
        return "unknown error";
    }
}

int err_set(lily_err *err, int code, const char *fmt, ...) {
    if (err) {
        va_list args;
        va_start(args, fmt);
        err->code = code;
        vsnprintf(err->msg, sizeof err->msg, fmt, args);
        va_end(args);
    }
    return code;
}

int err_prefix(lily_err *err, int code, const char *fmt, ...) {
    if (err) {
        char tail[sizeof err->msg];
        memcpy(tail, err->msg, sizeof tail);
        va_list args;
        va_start(args, fmt);
        int used = vsnprintf(err->msg, sizeof err->msg, fmt, args);
        va_end(args);
        if (used >= 0 && (size_t)used < sizeof err->msg) {
            size_t room = sizeof err->msg - (size_t)used;
            snprintf(err->msg + used, room, ": %.*s", (int)room, tail);
        }
        err->code = code;
    }
    return code;
}

int err_from_errno(int errno_value) {
    switch (errno_value) {
    case ENOENT:
    case ENOTDIR:
        return LILY_ENOENT;
    case EACCES:
    case EPERM:
    case EROFS:
        return LILY_EPERM;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return LILY_ENOSPC;
    case ENOMEM:
        return LILY_ENOMEM;
    default:
        return LILY_EIO;
    }
}
