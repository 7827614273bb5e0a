/* The one error convention: functions return 0 or a negative LILY_E* code and describe the failure
 * in a caller-owned lily_err. A call that fails leaves nothing for the caller to undo. */
#ifndef LILY_ERROR_H
#define LILY_ERROR_H

/* name, value, what the class of failure means to the caller */
#define LILY_ERROR_MAP(XX)                                                                         \
    XX(LILY_EINVAL, -1, "invalid argument or request")                                             \
    XX(LILY_ENOMEM, -2, "out of memory")                                                           \
    XX(LILY_EIO, -3, "input or output failed")                                                     \
    XX(LILY_ENOENT, -4, "not found")                                                               \
    XX(LILY_EPERM, -5, "permission denied")                                                        \
    XX(LILY_EFORMAT, -6, "damaged or malformed file")                                              \
    XX(LILY_EMODEL, -7, "not a model this program runs")                                           \
    XX(LILY_ENOSPC, -8, "no space left")                                                           \
    XX(LILY_ECANCELED, -9, "cancelled")                                                            \
    XX(LILY_ECONTEXT, -10, "context length exceeded")                                              \
    XX(LILY_EBUSY, -11, "busy")                                                                    \
    XX(LILY_EBACKEND, -12, "backend unavailable or failed")                                        \
    XX(LILY_ENUMERIC, -13, "non-finite values in the model's state")

enum lily_errno {
    LILY_OK = 0,
#define LILY_ERROR_ENUM(name, value, text) name = value,
    LILY_ERROR_MAP(LILY_ERROR_ENUM)
#undef LILY_ERROR_ENUM
};

/* msg is "<object>: <found>, expected <wanted>; <what to do>", always terminated. */
typedef struct lily_err {
    int code;
    char msg[512];
} lily_err;

/* The class text of a code ("out of memory"), never NULL. */
const char *lily_strerror(int code);

#endif
