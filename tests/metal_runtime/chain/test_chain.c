/* The emulated runtime over the real executor: norm, two independent row products, gate, in one
 * concurrent encoder with three barriers. All three: right values, no finding, four stages. Any one
 * left out: a hazard that names it, in every order of execution. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "../../../src/backend/metal/mtl.h"
#include "../../../tools/metal_emulator/runtime/emulator.h"

enum { WIDTH = 64, ROWS = 32 };
enum { SQUARE_SUM, NORMALISE, ROW_DOT, GATED, KERNELS };
enum { X, SUM, Y, W_GATE, W_UP, GATE, UP, OUT, BUFFERS };
enum { BARRIER_SUM = 1, BARRIER_Y = 2, BARRIER_PRODUCTS = 4, ALL_BARRIERS = 7 };

static const char *const kernel_names[] = {"square_sum", "normalise", "row_dot", "gated"};
static const struct {
    const char *label;
    size_t floats;
} buffer_table[] = {{"x", WIDTH},          {"sum", 1},     {"y", WIDTH}, {"w_gate", ROWS *WIDTH},
                    {"w_up", ROWS *WIDTH}, {"gate", ROWS}, {"up", ROWS}, {"out", ROWS}};

struct layer {
    id device, queue;
    id pipelines[KERNELS];
    id buffers[BUFFERS];
};

static char *source_text(void) {
    FILE *file = fopen(CHAIN_SOURCE, "r");
    assert_non_null(file);
    char *text = calloc(1, 1 << 16);
    assert_true(fread(text, 1, (1 << 16) - 1, file) > 0);
    fclose(file);
    return text;
}

static void fill(float *values, size_t count, uint32_t state) {
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (float)(state >> 8) / (float)(1 << 24) - 0.5f;
    }
}

static void layer_open(struct layer *layer) {
    id error = NULL, options = mtl_new_compile_options();
    char *text = source_text();
    layer->device = MTLCreateSystemDefaultDevice();
    layer->queue = mtl_new_queue(layer->device);
    mtl_options_set_language_version(options, MTLLanguageVersion3_1);
    mtl_options_set_math_mode(options, MTLMathModeSafe);
    mtl_options_set_math_functions(options, MTLMathFloatingPointFunctionsPrecise);
    id library = mtl_new_library(layer->device, ns_string(text), options, &error);
    if (!library) fail_msg("%s", ns_error_text(error));
    free(text);
    for (size_t i = 0; i < KERNELS; i++) {
        id function = mtl_new_function(library, ns_string(kernel_names[i]));
        layer->pipelines[i] = mtl_new_pipeline(layer->device, function, &error);
        if (!layer->pipelines[i]) fail_msg("%s", ns_error_text(error));
        objc_release(function);
    }
    objc_release(library);
    objc_release(options);
    for (uint32_t i = 0; i < BUFFERS; i++) {
        size_t floats = buffer_table[i].floats;
        layer->buffers[i] = mtl_new_buffer(layer->device, 4 * floats, 0);
        mtl_set_label(layer->buffers[i], ns_string(buffer_table[i].label));
        fill(mtl_buffer_contents(layer->buffers[i]), floats, i);
    }
}

static void layer_close(struct layer *layer) {
    for (size_t i = 0; i < BUFFERS; i++) objc_release(layer->buffers[i]);
    for (size_t i = 0; i < KERNELS; i++) objc_release(layer->pipelines[i]);
    objc_release(layer->queue);
    objc_release(layer->device);
}

/* `buffers` ends with -1; the width follows at the next index when the kernel wants it. */
static void dispatch(struct layer *layer, id encoder, int kernel, const int *buffers,
                     bool with_width, NSUInteger groups) {
    uint32_t width = WIDTH;
    NSUInteger index = 0;
    mtl_set_pipeline(encoder, layer->pipelines[kernel]);
    for (; buffers[index] >= 0; index++) {
        mtl_set_buffer(encoder, layer->buffers[buffers[index]], 0, index);
    }
    if (with_width) mtl_set_bytes(encoder, &width, sizeof width, index);
    mtl_dispatch(encoder, (MTLSize){groups, 1, 1}, (MTLSize){32, 1, 1});
}

static void layer_run(struct layer *layer, int barriers) {
    id commands = mtl_command_buffer(layer->queue);
    id encoder = mtl_compute_encoder(commands, MTLDispatchTypeConcurrent);
    const id products[] = {layer->buffers[GATE], layer->buffers[UP]};
    dispatch(layer, encoder, SQUARE_SUM, (int[]){X, SUM, -1}, true, 1);
    if (barriers & BARRIER_SUM) mtl_barrier_resources(encoder, &layer->buffers[SUM], 1);
    dispatch(layer, encoder, NORMALISE, (int[]){X, SUM, Y, -1}, true, WIDTH / 32);
    if (barriers & BARRIER_Y) mtl_barrier_resources(encoder, &layer->buffers[Y], 1);
    dispatch(layer, encoder, ROW_DOT, (int[]){W_GATE, Y, GATE, -1}, true, ROWS);
    dispatch(layer, encoder, ROW_DOT, (int[]){W_UP, Y, UP, -1}, true, ROWS);
    if (barriers & BARRIER_PRODUCTS) mtl_barrier_resources(encoder, products, 2);
    dispatch(layer, encoder, GATED, (int[]){GATE, UP, OUT, -1}, false, ROWS / 32);
    mtl_end_encoding(encoder);
    mtl_commit(commands);
    mtl_wait_completed(commands);
    assert_int_equal(mtl_status(commands), MTLCommandBufferStatusCompleted);
}

static const float *contents(const struct layer *layer, int buffer) {
    return mtl_buffer_contents(layer->buffers[buffer]);
}

/* The largest difference from the layer in double precision. */
static double largest_error(const struct layer *layer) {
    const float *x = contents(layer, X), *out = contents(layer, OUT);
    double sum = 0, largest = 0;
    for (int i = 0; i < WIDTH; i++) sum += (double)x[i] * x[i];
    double scale = 1 / sqrt(sum / WIDTH + 1e-6);
    for (int row = 0; row < ROWS; row++) {
        double gate = 0, up = 0;
        for (int i = 0; i < WIDTH; i++) {
            gate += (double)contents(layer, W_GATE)[row * WIDTH + i] * x[i] * scale;
            up += (double)contents(layer, W_UP)[row * WIDTH + i] * x[i] * scale;
        }
        largest = fmax(largest, fabs(gate / (1 + exp(-gate)) * up - out[row]));
    }
    return largest;
}

static int64_t graph_field(const char *name) {
    char *text = metal_emu_graph_json(metal_emu_graph_count() - 1);
    json_t *graph = json_loads(text, 0, NULL);
    int64_t value = json_integer_value(json_object_get(graph, name));
    json_decref(graph);
    free(text);
    return value;
}

static void check_right(const struct layer *layer) {
    if (metal_emu_finding_count() > 0) fail_msg("%s", metal_emu_finding(0)->text);
    assert_true(largest_error(layer) < 1e-5);
    assert_int_equal(graph_field("dispatches"), 5);
    assert_int_equal(graph_field("stages"), 4);
    assert_int_equal(graph_field("barriers"), 3);
    /* Every input once; sum, y, gate and up are read too. */
    assert_int_equal(graph_field("unique_read"),
                     4 * (WIDTH + 1 + WIDTH + 2 * ROWS * WIDTH + 2 * ROWS));
    assert_int_equal(graph_field("unique_written"), 4 * (1 + WIDTH + 3 * ROWS));
}

/* Only hazards, and one of them names the earlier kernel and the buffer. */
static void check_hazard(const char *earlier, const char *buffer) {
    bool named = false;
    for (size_t i = 0; i < metal_emu_finding_count(); i++) {
        const struct metal_emu_finding *finding = metal_emu_finding(i);
        if (finding->kind != METAL_EMU_HAZARD) fail_msg("%s", finding->text);
        named = named || (strstr(finding->text, earlier) && strstr(finding->text, buffer));
    }
    assert_true(named);
}

static void every_barrier_is_needed(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 3; seed++) {
        struct metal_emu_options options = metal_emu_defaults();
        options.quiet = true;
        options.seed = seed;
        metal_emu_configure(&options);
        void *pool = objc_autoreleasePoolPush();
        struct layer layer;
        layer_open(&layer);
        layer_run(&layer, ALL_BARRIERS);
        check_right(&layer);
        metal_emu_reset();
        layer_run(&layer, ALL_BARRIERS & ~BARRIER_SUM);
        check_hazard("square_sum", "of sum");
        metal_emu_reset();
        layer_run(&layer, ALL_BARRIERS & ~BARRIER_Y);
        check_hazard("normalise", "of y");
        metal_emu_reset();
        layer_run(&layer, ALL_BARRIERS & ~BARRIER_PRODUCTS);
        check_hazard("row_dot", "of gate");
        metal_emu_reset();
        layer_close(&layer);
        objc_autoreleasePoolPop(pool);
        assert_int_equal(metal_emu_live_objects(), 0);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_barrier_is_needed)};
    return cmocka_run_group_tests_name("chain", tests, NULL, NULL);
}
