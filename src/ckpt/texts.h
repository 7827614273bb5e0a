/* The text files of a checkpoint, read whole, and what can be learnt from them. */
#ifndef LILY_CKPT_TEXTS_H
#define LILY_CKPT_TEXTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ckpt/faults.h"
#include "ckpt/folder.h"

enum text_file {
    TEXT_CONFIG,
    TEXT_TOKENIZER,
    TEXT_TOKENIZER_CONFIG,
    TEXT_GENERATION_CONFIG,
    TEXT_CHAT_TEMPLATE,
    TEXT_COUNT
};
const char *text_file_name(enum text_file file); /* "config.json", ... */

struct texts {
    struct {
        const char *data; /* [size], NULL when absent */
        size_t size;
        struct file_map map; /* what data points into, when this struct owns it */
    } file[TEXT_COUNT];
};

/* Reads those that the folder has; the caller ends *out with texts_close. */
int texts_open(const struct folder *folder, struct texts *out, struct faults *f);
void texts_close(struct texts *t);

/* One more than the highest id that has a token, from tokenizer.json and the added tokens of
 * tokenizer_config.json, at most vocab. Without a tokenizer.json: vocab, with a warning. */
int texts_vocab_used(const struct texts *t, const char *where, int32_t vocab, int32_t *out,
                     struct faults *f);

/* The chat template: chat_template.jinja, or chat_template inside tokenizer_config.json. */
struct template_info {
    bool present;
    char sha256[65]; /* 64 hex digits, or empty */
    bool known;      /* it is the template this program renders */
};
int texts_template(const struct texts *t, struct template_info *out, struct faults *f);
extern const char texts_known_template[]; /* its SHA-256 */

/* Warns about a template other than the one this program renders, and names Qwen3.5, which has the
 * same shape and an older template. */
int texts_check_template(const struct texts *t, const char *where, struct faults *f);

#endif
