/* config.json and the other JSON files of a checkpoint on any bytes: by loading's rules, and by an
 * inspection's, which goes on after a fault. */
#include <stdlib.h>
#include <string.h>

#include "ckpt/config.h"
#include "ckpt/texts.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void ignore_warning(void *arg, const char *line) {
    (void)arg;
    if (strlen(line) > 4096) abort();
}

static void check_config(const char *text, size_t size, json_t *list) {
    lily_err err = {0};
    struct faults f = {.err = &err, .list = list, .warn = ignore_warning};
    struct config c;
    if (config_parse("fuzz", text, size, &c, &f) != 0) {
        if (!err.code || !*err.msg) abort();
        return;
    }
    if (c.shape && (c.layers < 4 || c.layers > c.shape->layers || c.layers % 4 != 0)) abort();
    int32_t bits = -1;
    if (c.shape) {
        (void)config_module_bits(&c, "language_model.model.layers.0.mlp.gate", &bits, &f);
        if (bits != 0 && bits != 4 && bits != 8 && bits != 16) abort();
    }
    config_close(&c);
}

static void check_texts(const char *text, size_t size, enum text_file file) {
    lily_err err = {0};
    struct faults f = {.err = &err, .warn = ignore_warning};
    struct texts t = {0};
    t.file[TEXT_TOKENIZER].data = "{}";
    t.file[TEXT_TOKENIZER].size = 2;
    t.file[file].data = text;
    t.file[file].size = size;
    int32_t used;
    if (texts_vocab_used(&t, "fuzz", 4096, &used, &f) == 0 && (used < 1 || used > 4096)) abort();
    (void)texts_check_template(&t, "fuzz", &f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    /* Not terminated by a zero: readers must keep to the length. */
    char *text = malloc(size ? size : 1);
    if (!text) return 0;
    if (size) memcpy(text, data, size);
    check_config(text, size, NULL);
    json_t *list = json_array();
    check_config(text, size, list);
    json_decref(list);
    check_texts(text, size, TEXT_TOKENIZER);
    check_texts(text, size, TEXT_TOKENIZER_CONFIG);
    check_texts(text, size, TEXT_CHAT_TEMPLATE);
    free(text);
    return 0;
}
