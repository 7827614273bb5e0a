/* libcuda.so.1 without a card, for tests of the whole program: tests/unit/cuda_fake.h as a library
 * that LD_LIBRARY_PATH leads to. Kernels do nothing, so every logit is 0. FAKE_CUDA says what is
 * wrong with the card: words of the form name=value. */
#include "../unit/cuda_fake.h"

static long value_of(const char *words, const char *name, long otherwise) {
    const char *at = words ? strstr(words, name) : NULL;
    return at ? strtol(at + strlen(name), NULL, 10) : otherwise;
}

__attribute__((constructor)) static void set_up(void) {
    const char *words = getenv("FAKE_CUDA");
    card_reset();
    card.version = (int)value_of(words, "version=", card.version);
    card.init = (int)value_of(words, "init=", 0);
    card.devices = (int)value_of(words, "devices=", 1);
    card.capability = (int)value_of(words, "capability=", 89);
    card.memory = (size_t)value_of(words, "memory=", (long)card.memory);
    card.context = (size_t)value_of(words, "context=", 0);
    card.wait_ms = value_of(words, "wait_ms=", 0);
    card.module_error = (int)value_of(words, "module=", 0);
    card.no_module = card.module_error ? "" : NULL;
}
