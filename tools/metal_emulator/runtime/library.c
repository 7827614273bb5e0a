/* Source text to pipelines: MTLCompileOptions, MTLLibrary, MTLFunctionConstantValues, MTLFunction,
 * MTLComputePipelineState. The work is the executor's; here are the API's own rules. */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct compile_options {
    struct objc_object object;
    NSUInteger version;
    bool version_set, math_set, math_safe, precise;
};

static void set_error(id *error, NSInteger code, const char *text) {
    if (error) *error = emu_autorelease(emu_error_new(code, text));
}

/* ---- Compile options ---- */

static id options_new(id class, SEL selector) {
    (void)class;
    (void)selector;
    return emu_new(&emu_options_class);
}

static void options_set_version(id self, SEL selector, NSUInteger version) {
    (void)selector;
    ((struct compile_options *)self)->version = version;
    ((struct compile_options *)self)->version_set = true;
}

static void options_set_math(id self, SEL selector, NSInteger mode) {
    (void)selector;
    ((struct compile_options *)self)->math_set = true;
    ((struct compile_options *)self)->math_safe = mode == MTLMathModeSafe;
}

static void options_set_functions(id self, SEL selector, NSInteger functions) {
    (void)selector;
    ((struct compile_options *)self)->precise = functions == MTLMathFloatingPointFunctionsPrecise;
}

static void options_set_fast_math(id self, SEL selector, bool enabled) {
    options_set_math(self, selector, enabled ? MTLMathModeFast : MTLMathModeSafe);
    ((struct compile_options *)self)->precise = !enabled;
}

static const struct emu_method options_class_methods[] = {
    EMU_METHOD("new", options_new),
    EMU_METHODS_END,
};
static const struct emu_method options_methods[] = {
    EMU_METHOD("setLanguageVersion:", options_set_version),
    EMU_METHOD("setMathMode:", options_set_math),
    EMU_METHOD("setMathFloatingPointFunctions:", options_set_functions),
    EMU_METHOD("setFastMathEnabled:", options_set_fast_math),
    EMU_METHODS_END,
};
struct objc_class emu_options_class = {
    .object.isa = &emu_metaclass,
    .name = "MTLCompileOptions",
    .size = sizeof(struct compile_options),
    .methods = options_methods,
    .class_methods = options_class_methods,
};

/* ---- Library ---- */

/* What was compiled, for the life of the process: starting the front end takes longer than a test.
 */
struct compiled {
    struct compiled *next;
    char *source;
    msl_compile_options options;
    msl_library *library;
};
static struct compiled *compiled;

static bool same_options(const msl_compile_options *a, const msl_compile_options *b) {
    return a->checked == b->checked && a->contract == b->contract && a->cache_dir == b->cache_dir &&
           a->language == b->language;
}

/* NULL, with the diagnostics in message, when the source is refused. */
static msl_library *compile(const char *source, const msl_compile_options *options, char *message) {
    for (struct compiled *c = compiled; c; c = c->next) {
        if (same_options(&c->options, options) && strcmp(c->source, source) == 0) {
            return c->library;
        }
    }
    msl_library *library = NULL;
    if (msl_library_compile(source, options, &library, message) != 0) return NULL;
    struct compiled *c = malloc(sizeof *c);
    if (!c) abort();
    *c = (struct compiled){compiled, strdup(source), *options, library};
    if (!c->source) abort();
    compiled = c;
    return library;
}

/* 310 for version 3.1, which Metal numbers 3 << 16 | 1. */
static uint32_t language_of(const struct compile_options *options) {
    if (!options || !options->version_set) return 0;
    return (uint32_t)(options->version >> 16) * 100 + (uint32_t)(options->version & 0xffff) * 10;
}

/* Why the profile's system does not compile it, or NULL. */
static const char *refused_by_system(uint32_t language, const char *source) {
    int32_t macos = emu_options.profile.macos;
    if (language >= 400 && macos < 2600) {
        return "language version 4.0 is not supported by this system";
    }
    if (language == 320 && macos < 1500) {
        return "language version 3.2 is not supported by this system";
    }
    if (macos < 2602 && strstr(source, "<metal_tensor>") && strstr(source, "bfloat")) {
        return "tensor operations on bfloat are not supported by this system";
    }
    return NULL;
}

id emu_device_new_library(id device, SEL selector, id source, id options, id *error) {
    (void)device;
    (void)selector;
    if (!emu_expect(source, &emu_string_class, "a library's source")) return NULL;
    const struct compile_options *chosen = (struct compile_options *)options;
    if (!chosen || !chosen->version_set) {
        emu_find(METAL_EMU_COMPILE_OPTIONS, "no language version: it would follow the system's");
    }
    if (!chosen || !chosen->math_set || !chosen->math_safe) {
        emu_find(METAL_EMU_COMPILE_OPTIONS, "the math mode is not safe (the default is fast)");
    } else if (!chosen->precise) {
        emu_find(METAL_EMU_COMPILE_OPTIONS, "the math functions are not precise, but fast");
    }
    const char *refusal = refused_by_system(language_of(chosen), emu_text(source));
    if (refusal) {
        set_error(error, 1, refusal);
        return NULL;
    }
    char *message = calloc(1, MSL_MESSAGE_MAX);
    if (!message) abort();
    msl_compile_options how = {.checked = emu_options.checked,
                               .contract = emu_options.contract,
                               .cache_dir = emu_options.cache_dir,
                               .language = language_of(chosen)};
    struct emu_library *library = NULL;
    msl_library *made = compile(emu_text(source), &how, message);
    if (made) {
        library = emu_new(&emu_library_class);
        library->library = made;
    } else {
        set_error(error, 3, message);
    }
    free(message);
    return (id)library;
}

static id new_function(struct emu_library *library, id name, struct emu_constants *constants) {
    const msl_kernel *kernel = msl_library_find(library->library, emu_text(name));
    if (!kernel) return NULL;
    struct emu_function *function = emu_new(&emu_function_class);
    function->library = library;
    objc_retain(&library->object);
    function->kernel = kernel;
    if (constants) {
        function->constants = malloc(sizeof *constants);
        if (!function->constants) abort();
        memcpy(function->constants->values, constants->values, sizeof constants->values);
    }
    return &function->object;
}

static id library_function(id self, SEL selector, id name) {
    (void)selector;
    return new_function((struct emu_library *)self, name, NULL);
}

static id library_specialised(id self, SEL selector, id name, id constants, id *error) {
    (void)selector;
    id function = new_function((struct emu_library *)self, name, (struct emu_constants *)constants);
    if (!function) set_error(error, 2, "the library has no function of that name");
    return function;
}

static const struct emu_method library_methods[] = {
    EMU_METHOD("newFunctionWithName:", library_function),
    EMU_METHOD("newFunctionWithName:constantValues:error:", library_specialised),
    EMU_METHODS_END,
};
struct objc_class emu_library_class = {
    .object.isa = &emu_metaclass,
    .name = "MTLLibrary",
    .size = sizeof(struct emu_library),
    .methods = library_methods,
};

/* ---- Function constants ---- */

static id constants_new(id class, SEL selector) {
    (void)class;
    (void)selector;
    return emu_new(&emu_constants_class);
}

static uint32_t type_size(NSUInteger type) {
    switch (type) {
    case MTLDataTypeFloat:
    case MTLDataTypeInt:
    case MTLDataTypeUInt:
        return 4;
    case MTLDataTypeShort:
    case MTLDataTypeUShort:
        return 2;
    case MTLDataTypeBool:
        return 1;
    default:
        return 0;
    }
}

static void constants_set(id self, SEL selector, const void *value, NSUInteger type,
                          NSUInteger index) {
    (void)selector;
    struct emu_constants *constants = (struct emu_constants *)self;
    uint32_t size = type_size(type);
    if (size == 0 || index >= 64) {
        emu_find(METAL_EMU_CONSTANT, "type %lu at index %lu is not known here", type, index);
        return;
    }
    memcpy(constants->values[index].bytes, value, size);
    constants->values[index].size = size;
    constants->values[index].set = true;
}

static const struct emu_method constants_class_methods[] = {
    EMU_METHOD("new", constants_new),
    EMU_METHODS_END,
};
static const struct emu_method constants_methods[] = {
    EMU_METHOD("setConstantValue:type:atIndex:", constants_set),
    EMU_METHODS_END,
};
struct objc_class emu_constants_class = {
    .object.isa = &emu_metaclass,
    .name = "MTLFunctionConstantValues",
    .size = sizeof(struct emu_constants),
    .methods = constants_methods,
    .class_methods = constants_class_methods,
};

/* ---- Functions and pipelines ---- */

static void function_dealloc(id self) {
    struct emu_function *function = (struct emu_function *)self;
    free(function->constants);
    objc_release(&function->library->object);
}

static const struct emu_method no_methods[] = {EMU_METHODS_END};
struct objc_class emu_function_class = {
    .object.isa = &emu_metaclass,
    .name = "MTLFunction",
    .size = sizeof(struct emu_function),
    .methods = no_methods,
    .dealloc = function_dealloc,
};

id emu_device_new_pipeline(id device, SEL selector, struct emu_function *function, id *error) {
    (void)device;
    (void)selector;
    if (!emu_expect((id)function, &emu_function_class, "a pipeline's function")) return NULL;
    msl_constant_value values[64];
    size_t count = 0;
    for (uint32_t i = 0; function->constants && i < 64; i++) {
        if (!function->constants->values[i].set) continue;
        values[count++] = (msl_constant_value){.index = i,
                                               .size = function->constants->values[i].size,
                                               .value = function->constants->values[i].bytes};
    }
    char *message = calloc(1, MSL_MESSAGE_MAX);
    if (!message) abort();
    msl_pipeline *made = NULL;
    struct emu_pipeline *pipeline = NULL;
    if (msl_pipeline_create(function->library->library, function->kernel->name, values, count,
                            &made, message) == 0) {
        pipeline = emu_new(&emu_pipeline_class);
        pipeline->pipeline = made;
        pipeline->kernel = function->kernel;
        pipeline->library = function->library;
        objc_retain(&function->library->object);
        pipeline->max_threads = function->kernel->max_threads;
        if (emu_options.pipeline_threads && emu_options.pipeline_threads < pipeline->max_threads) {
            pipeline->max_threads = emu_options.pipeline_threads;
        }
    } else {
        set_error(error, 3, message);
    }
    free(message);
    return (id)pipeline;
}

static void pipeline_dealloc(id self) {
    struct emu_pipeline *pipeline = (struct emu_pipeline *)self;
    msl_pipeline_free(pipeline->pipeline);
    objc_release(&pipeline->library->object);
}

static NSUInteger pipeline_max_threads(id self, SEL selector) {
    (void)selector;
    return ((struct emu_pipeline *)self)->max_threads;
}

static NSUInteger pipeline_simd_width(id self, SEL selector) {
    (void)self;
    (void)selector;
    return MSL_SIMD_WIDTH;
}

static const struct emu_method pipeline_methods[] = {
    EMU_METHOD("maxTotalThreadsPerThreadgroup", pipeline_max_threads),
    EMU_METHOD("threadExecutionWidth", pipeline_simd_width),
    EMU_METHODS_END,
};
struct objc_class emu_pipeline_class = {
    .object.isa = &emu_metaclass,
    .name = "MTLComputePipelineState",
    .size = sizeof(struct emu_pipeline),
    .methods = pipeline_methods,
    .dealloc = pipeline_dealloc,
};
