#include "base/err.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <utf8proc.h>

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

void err_clean(char *msg) {
    utf8proc_ssize_t len = 1;
    for (char *p = msg; *p; p += len) {
        utf8proc_int32_t c;
        len = utf8proc_iterate((const utf8proc_uint8_t *)p, -1, &c);
        if (len > 0 && c >= 0x20 && (c < 0x7f || c >= 0xa0)) continue;
        *p = '?';
        if (len > 1) memmove(p + 1, p + len, strlen(p + len) + 1); /* U+0080 to U+009F */
        len = 1;
    }
}

int err_set(lily_err *err, int code, const char *fmt, ...) {
    if (err) {
        va_list args;
        va_start(args, fmt);
        err->code = code;
        vsnprintf(err->msg, sizeof err->msg, fmt, args);
        va_end(args);
        err_clean(err->msg);
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
        err_clean(err->msg);
    }
    return code;
}

static const char *errno_remedy(int errno_value) {
    switch (errno_value) {
    case ENOENT:
    case ENOTDIR:
        return "check the path; its folder must exist";
    case EACCES:
    case EPERM:
        return "check the permissions of file and folder";
    case EROFS:
        return "choose a place that can be written to";
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return "free space or choose another disk";
    case ENOMEM:
        return "free memory or raise its limit (ulimit -v)";
    case EMFILE:
    case ENFILE:
        return "raise the limit on open files (ulimit -n)";
    case EISDIR:
        return "give a file's path";
    case ELOOP:
    case ENAMETOOLONG:
        return "check the path and its symbolic links";
    default:
        return "check the disk";
    }
}

int err_system(lily_err *err, int errno_value, const char *object, const char *verb) {
    return ERR(err, err_from_errno(errno_value), "%s: cannot %s: %s; %s", object, verb,
               strerror(errno_value), errno_remedy(errno_value));
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
