#include "ckpt/json.h"

int json_parse_object(const char *what, const char *text, size_t n, json_t **out, lily_err *err) {
    json_error_t e;
    if (n == 0) text = ""; /* an empty file has no mapping */
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &e);
    if (!root) {
        if (json_error_code(&e) == json_error_out_of_memory) return ERR_NOMEM(err, what);
        return ERR(err, LILY_EFORMAT,
                   "%s: found invalid JSON at line %d, column %d (%s), expected an object in valid "
                   "UTF-8 without repeated keys; download the file again",
                   what, e.line, e.column, e.text);
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return ERR(err, LILY_EFORMAT,
                   "%s: found JSON that is not an object, expected an object; download the file "
                   "again",
                   what);
    }
    *out = root;
    return 0;
}
