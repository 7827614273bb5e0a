/* NSString and NSError, as far as the Metal host meets them. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

id emu_string_new(const char *text) {
    struct emu_string *string = emu_new(&emu_string_class);
    string->text = strdup(text);
    if (!string->text) abort();
    return &string->object;
}

const char *emu_text(id string) {
    return string ? ((struct emu_string *)string)->text : "";
}

void emu_copy_label(char **label, id string) {
    free(*label);
    *label = strdup(emu_text(string));
}

static void string_dealloc(id self) {
    free(((struct emu_string *)self)->text);
}

static id string_with_utf8(id class, SEL selector, const char *utf8) {
    (void)class;
    (void)selector;
    return emu_autorelease(emu_string_new(utf8));
}

static const char *string_utf8(id self, SEL selector) {
    (void)selector;
    return emu_text(self);
}

static const struct emu_method string_class_methods[] = {
    EMU_METHOD("stringWithUTF8String:", string_with_utf8),
    EMU_METHODS_END,
};
static const struct emu_method string_methods[] = {
    EMU_METHOD("UTF8String", string_utf8),
    EMU_METHODS_END,
};
struct objc_class emu_string_class = {
    .object.isa = &emu_metaclass,
    .name = "NSString",
    .size = sizeof(struct emu_string),
    .methods = string_methods,
    .class_methods = string_class_methods,
    .dealloc = string_dealloc,
};

id emu_error_new(NSInteger code, const char *text) {
    struct emu_error *error = emu_new(&emu_error_class);
    error->code = code;
    error->text = (struct emu_string *)emu_string_new(text);
    return &error->object;
}

static void error_dealloc(id self) {
    objc_release(&((struct emu_error *)self)->text->object);
}

static NSInteger error_code(id self, SEL selector) {
    (void)selector;
    return ((struct emu_error *)self)->code;
}

static id error_text(id self, SEL selector) {
    (void)selector;
    return &((struct emu_error *)self)->text->object;
}

static const struct emu_method error_methods[] = {
    EMU_METHOD("code", error_code),
    EMU_METHOD("localizedDescription", error_text),
    EMU_METHODS_END,
};
struct objc_class emu_error_class = {
    .object.isa = &emu_metaclass,
    .name = "NSError",
    .size = sizeof(struct emu_error),
    .methods = error_methods,
    .dealloc = error_dealloc,
};
