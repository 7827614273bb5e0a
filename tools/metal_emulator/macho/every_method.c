/* A host that calls every function of mtl.h and objc.h. The Mach-O check compiles and links it for
 * macOS; tests/metal_runtime runs it in the emulator, so that no selector of mtl.h is unknown. */
#include "../../../src/backend/metal/mtl.h"

static id build(id device, id *error) {
    id options = mtl_new_compile_options();
    mtl_options_set_language_version(options, MTLLanguageVersion3_1);
    if (objc_responds(options, "setMathMode:")) {
        mtl_options_set_math_mode(options, MTLMathModeSafe);
        mtl_options_set_math_functions(options, MTLMathFloatingPointFunctionsPrecise);
    } else {
        mtl_options_set_fast_math(options, false);
    }
    id library = mtl_new_library(
        device, ns_string("kernel void scale(device float *x [[buffer(0)]]) { x[0] *= 2; }"),
        options, error);
    objc_release(options);
    if (!library) return NULL;
    id constants = mtl_new_function_constants();
    uint32_t width = 32;
    mtl_constants_set(constants, &width, MTLDataTypeUInt, 0);
    id function = mtl_new_function_specialised(library, ns_string("scale"), constants, error);
    if (!function) function = mtl_new_function(library, ns_string("scale"));
    id pipeline = mtl_new_pipeline(device, function, error);
    objc_release(function);
    objc_release(constants);
    objc_release(library);
    return pipeline;
}

static void encode(id commands, id pipeline, id buffer) {
    id encoder = mtl_compute_encoder(commands, MTLDispatchTypeConcurrent);
    uint32_t argument = 1;
    MTLSize groups = {2, 3, 4};
    MTLSize threads = {mtl_pipeline_simd_width(pipeline), 1, 1};
    if (threads.width > mtl_pipeline_max_threads(pipeline)) threads.width = 1;
    mtl_set_pipeline(encoder, pipeline);
    mtl_set_buffer(encoder, buffer, 16, 0);
    mtl_set_bytes(encoder, &argument, sizeof argument, 1);
    mtl_set_threadgroup_memory(encoder, 64, 0);
    mtl_dispatch(encoder, groups, threads);
    mtl_barrier_scope(encoder, MTLBarrierScopeBuffers);
    mtl_dispatch_indirect(encoder, buffer, 0, threads);
    mtl_barrier_resources(encoder, &buffer, 1);
    mtl_end_encoding(encoder);
}

static double run(id queue, id event, id pipeline, id buffer) {
    id commands = mtl_command_buffer(queue);
    mtl_set_label(commands, ns_string("check"));
    mtl_encode_wait(commands, event, 1);
    encode(commands, pipeline, buffer);
    mtl_encode_signal(commands, event, 2);
    mtl_event_set_value(event, 1);
    mtl_commit(commands);
    mtl_wait_completed(commands);
    if (mtl_status(commands) != MTLCommandBufferStatusCompleted) {
        return ns_error_code(mtl_error(commands)) && ns_error_text(mtl_error(commands)) ? -1 : -2;
    }
    return mtl_gpu_end_time(commands) - mtl_gpu_start_time(commands);
}

int main(void) {
    static _Alignas(16384) char mapped[16384];
    void *pool = objc_autoreleasePoolPush();
    id error = NULL, device = MTLCreateSystemDefaultDevice();
    id queue = mtl_new_queue(device), event = mtl_new_shared_event(device);
    id pipeline = build(device, &error);
    id shared = mtl_new_buffer(device, mtl_device_max_threadgroup_memory(device), 0);
    id view = mtl_new_buffer_no_copy(device, mapped, sizeof mapped, 0);
    char *contents = mtl_buffer_contents(shared);
    contents[mtl_buffer_length(view) % 64] = mtl_device_name(device)[0];
    bool fits = mtl_device_allocated(device) < mtl_device_recommended_working_set(device) &&
                mtl_device_max_buffer_length(device) > 0 &&
                mtl_device_supports_family(device, MTLGPUFamilyApple7);
    double seconds = run(queue, event, pipeline, shared);
    id other = mtl_command_buffer_unretained(queue);
    mtl_commit(other);
    mtl_wait_completed(other);
    bool met = mtl_event_wait(event, 2, 10) && mtl_event_value(event) == 2;
    const id owned[] = {shared, objc_retain(view), view, pipeline, event, queue, device};
    for (size_t i = 0; i < sizeof owned / sizeof owned[0]; i++) objc_release(owned[i]);
    objc_autoreleasePoolPop(pool);
    return fits && met && seconds >= 0 ? 0 : 1;
}
