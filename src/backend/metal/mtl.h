/* The Metal classes, methods and constants that the host or the emulator's tests use, as typed C
 * functions; nothing else of Metal is reachable from them. Values and meanings follow Apple's Metal
 * framework reference.
 *
 * Every function is one message. Sizes and offsets are bytes. `error` arguments receive an
 * autoreleased NSError, or are left alone on success. Unless a function is named mtl_new_...,
 * what it returns is autoreleased. */
#ifndef LILY_BACKEND_METAL_MTL_H
#define LILY_BACKEND_METAL_MTL_H

#include "objc.h"

typedef struct {
    NSUInteger width, height, depth;
} MTLSize;

enum { MTLDispatchTypeSerial = 0, MTLDispatchTypeConcurrent = 1 };
enum { MTLBarrierScopeBuffers = 1 };
enum { MTLResourceStorageModeShared = 0, MTLResourceStorageModePrivate = 2 << 4 };
enum { MTLMathModeSafe = 0, MTLMathModeRelaxed = 1, MTLMathModeFast = 2 };
enum { MTLMathFloatingPointFunctionsFast = 0, MTLMathFloatingPointFunctionsPrecise = 1 };
enum { MTLLanguageVersion3_0 = 3 << 16, MTLLanguageVersion3_1 = (3 << 16) + 1 };
enum { MTLLanguageVersion3_2 = (3 << 16) + 2, MTLLanguageVersion4_0 = 4 << 16 };
enum {
    MTLDataTypeFloat = 3,
    MTLDataTypeInt = 29,
    MTLDataTypeUInt = 33,
    MTLDataTypeShort = 37,
    MTLDataTypeUShort = 41,
    MTLDataTypeBool = 53
};
enum {                             /* MTLGPUFamily */
       MTLGPUFamilyApple7 = 1007,  /* M1 */
       MTLGPUFamilyApple8 = 1008,  /* M2 */
       MTLGPUFamilyApple9 = 1009,  /* M3, M4 */
       MTLGPUFamilyApple10 = 1010, /* M5 */
       MTLGPUFamilyMetal3 = 5001,
       MTLGPUFamilyMetal4 = 5002
};
enum {
    MTLCommandBufferStatusNotEnqueued = 0,
    MTLCommandBufferStatusEnqueued = 1,
    MTLCommandBufferStatusCommitted = 2,
    MTLCommandBufferStatusScheduled = 3,
    MTLCommandBufferStatusCompleted = 4,
    MTLCommandBufferStatusError = 5
};
enum { /* codes of a command buffer's NSError */
       MTLCommandBufferErrorInternal = 1,
       MTLCommandBufferErrorTimeout = 2,
       MTLCommandBufferErrorPageFault = 3,
       MTLCommandBufferErrorAccessRevoked = 4,
       MTLCommandBufferErrorNotPermitted = 7,
       MTLCommandBufferErrorOutOfMemory = 8,
       MTLCommandBufferErrorInvalidResource = 9
};

/* ---- Device ---- */

extern id MTLCreateSystemDefaultDevice(void); /* the caller's; nil when there is none */

static inline const char *mtl_device_name(id device) {
    OBJC_SELECTOR("name");
    return ns_string_utf8(OBJC_SEND(id)(device, selector));
}

static inline uint64_t mtl_device_recommended_working_set(id device) {
    OBJC_SELECTOR("recommendedMaxWorkingSetSize");
    return OBJC_SEND(uint64_t)(device, selector);
}

static inline NSUInteger mtl_device_max_buffer_length(id device) {
    OBJC_SELECTOR("maxBufferLength");
    return OBJC_SEND(NSUInteger)(device, selector);
}

static inline NSUInteger mtl_device_max_threadgroup_memory(id device) {
    OBJC_SELECTOR("maxThreadgroupMemoryLength");
    return OBJC_SEND(NSUInteger)(device, selector);
}

/* Bytes of all resources made from the device. */
static inline NSUInteger mtl_device_allocated(id device) {
    OBJC_SELECTOR("currentAllocatedSize");
    return OBJC_SEND(NSUInteger)(device, selector);
}

static inline bool mtl_device_supports_family(id device, NSInteger family) {
    OBJC_SELECTOR("supportsFamily:");
    return OBJC_SEND(bool, NSInteger)(device, selector, family);
}

static inline id mtl_new_queue(id device) {
    OBJC_SELECTOR("newCommandQueue");
    return OBJC_SEND(id)(device, selector);
}

static inline id mtl_new_shared_event(id device) {
    OBJC_SELECTOR("newSharedEvent");
    return OBJC_SEND(id)(device, selector);
}

/* ---- Buffers ---- */

/* Contents undefined; nil when the length is 0, above maxBufferLength, or memory is short. */
static inline id mtl_new_buffer(id device, NSUInteger length, NSUInteger options) {
    OBJC_SELECTOR("newBufferWithLength:options:");
    return OBJC_SEND(id, NSUInteger, NSUInteger)(device, selector, length, options);
}

/* A view of the caller's own mapping: address and length are multiples of the page size, and the
 * mapping outlives the buffer. */
static inline id mtl_new_buffer_no_copy(id device, void *bytes, NSUInteger length,
                                        NSUInteger options) {
    OBJC_SELECTOR("newBufferWithBytesNoCopy:length:options:deallocator:");
    return OBJC_SEND(id, void *, NSUInteger, NSUInteger, id)(device, selector, bytes, length,
                                                             options, NULL);
}

static inline void *mtl_buffer_contents(id buffer) {
    OBJC_SELECTOR("contents");
    return OBJC_SEND(void *)(buffer, selector);
}

static inline NSUInteger mtl_buffer_length(id buffer) {
    OBJC_SELECTOR("length");
    return OBJC_SEND(NSUInteger)(buffer, selector);
}

/* ---- Libraries and pipelines ---- */

static inline id mtl_new_compile_options(void) {
    OBJC_SELECTOR("new");
    return OBJC_SEND(id)((id)objc_getClass("MTLCompileOptions"), selector);
}

static inline void mtl_options_set_language_version(id options, NSUInteger version) {
    OBJC_SELECTOR("setLanguageVersion:");
    OBJC_SEND(void, NSUInteger)(options, selector, version);
}

/* macOS 15 and later; see mtl_options_set_fast_math for earlier systems. */
static inline void mtl_options_set_math_mode(id options, NSInteger mode) {
    OBJC_SELECTOR("setMathMode:");
    OBJC_SEND(void, NSInteger)(options, selector, mode);
}

/* macOS 15 and later: which exp, sin, sqrt ... a call without a namespace means; fast unless set.
 */
static inline void mtl_options_set_math_functions(id options, NSInteger functions) {
    OBJC_SELECTOR("setMathFloatingPointFunctions:");
    OBJC_SEND(void, NSInteger)(options, selector, functions);
}

static inline void mtl_options_set_fast_math(id options, bool enabled) {
    OBJC_SELECTOR("setFastMathEnabled:");
    OBJC_SEND(void, bool)(options, selector, enabled);
}

/* `source` and `options` are an NSString and MTLCompileOptions. nil and *error on a bad source. */
static inline id mtl_new_library(id device, id source, id options, id *error) {
    OBJC_SELECTOR("newLibraryWithSource:options:error:");
    return OBJC_SEND(id, id, id, id *)(device, selector, source, options, error);
}

static inline id mtl_new_function_constants(void) {
    OBJC_SELECTOR("new");
    return OBJC_SEND(id)((id)objc_getClass("MTLFunctionConstantValues"), selector);
}

/* Copies one value of that MTLDataType. */
static inline void mtl_constants_set(id constants, const void *value, NSUInteger type,
                                     NSUInteger index) {
    OBJC_SELECTOR("setConstantValue:type:atIndex:");
    OBJC_SEND(void, const void *, NSUInteger, NSUInteger)(constants, selector, value, type, index);
}

/* nil when the library has no such function. */
static inline id mtl_new_function(id library, id name) {
    OBJC_SELECTOR("newFunctionWithName:");
    return OBJC_SEND(id, id)(library, selector, name);
}

static inline id mtl_new_function_specialised(id library, id name, id constants, id *error) {
    OBJC_SELECTOR("newFunctionWithName:constantValues:error:");
    return OBJC_SEND(id, id, id, id *)(library, selector, name, constants, error);
}

static inline id mtl_new_pipeline(id device, id function, id *error) {
    OBJC_SELECTOR("newComputePipelineStateWithFunction:error:");
    return OBJC_SEND(id, id, id *)(device, selector, function, error);
}

static inline NSUInteger mtl_pipeline_max_threads(id pipeline) {
    OBJC_SELECTOR("maxTotalThreadsPerThreadgroup");
    return OBJC_SEND(NSUInteger)(pipeline, selector);
}

static inline NSUInteger mtl_pipeline_simd_width(id pipeline) {
    OBJC_SELECTOR("threadExecutionWidth");
    return OBJC_SEND(NSUInteger)(pipeline, selector);
}

/* ---- Command buffers ---- */

static inline id mtl_command_buffer(id queue) {
    OBJC_SELECTOR("commandBuffer");
    return OBJC_SEND(id)(queue, selector);
}

/* Keeps nothing alive: every resource it uses must outlive its completion. */
static inline id mtl_command_buffer_unretained(id queue) {
    OBJC_SELECTOR("commandBufferWithUnretainedReferences");
    return OBJC_SEND(id)(queue, selector);
}

static inline void mtl_set_label(id object, id label) {
    OBJC_SELECTOR("setLabel:");
    OBJC_SEND(void, id)(object, selector, label);
}

static inline id mtl_compute_encoder(id command_buffer, NSUInteger dispatch_type) {
    OBJC_SELECTOR("computeCommandEncoderWithDispatchType:");
    return OBJC_SEND(id, NSUInteger)(command_buffer, selector, dispatch_type);
}

static inline void mtl_encode_signal(id command_buffer, id event, uint64_t value) {
    OBJC_SELECTOR("encodeSignalEvent:value:");
    OBJC_SEND(void, id, uint64_t)(command_buffer, selector, event, value);
}

static inline void mtl_encode_wait(id command_buffer, id event, uint64_t value) {
    OBJC_SELECTOR("encodeWaitForEvent:value:");
    OBJC_SEND(void, id, uint64_t)(command_buffer, selector, event, value);
}

static inline void mtl_commit(id command_buffer) {
    OBJC_SELECTOR("commit");
    OBJC_SEND(void)(command_buffer, selector);
}

static inline void mtl_wait_completed(id command_buffer) {
    OBJC_SELECTOR("waitUntilCompleted");
    OBJC_SEND(void)(command_buffer, selector);
}

static inline NSUInteger mtl_status(id command_buffer) {
    OBJC_SELECTOR("status");
    return OBJC_SEND(NSUInteger)(command_buffer, selector);
}

/* NSError once the status is Error, otherwise nil. */
static inline id mtl_error(id command_buffer) {
    OBJC_SELECTOR("error");
    return OBJC_SEND(id)(command_buffer, selector);
}

/* Seconds on one clock; 0 before completion. */
static inline double mtl_gpu_start_time(id command_buffer) {
    OBJC_SELECTOR("GPUStartTime");
    return OBJC_SEND(double)(command_buffer, selector);
}

static inline double mtl_gpu_end_time(id command_buffer) {
    OBJC_SELECTOR("GPUEndTime");
    return OBJC_SEND(double)(command_buffer, selector);
}

/* ---- Compute encoders ---- */

static inline void mtl_set_pipeline(id encoder, id pipeline) {
    OBJC_SELECTOR("setComputePipelineState:");
    OBJC_SEND(void, id)(encoder, selector, pipeline);
}

static inline void mtl_set_buffer(id encoder, id buffer, NSUInteger offset, NSUInteger index) {
    OBJC_SELECTOR("setBuffer:offset:atIndex:");
    OBJC_SEND(void, id, NSUInteger, NSUInteger)(encoder, selector, buffer, offset, index);
}

/* Copies at most 4,096 bytes. */
static inline void mtl_set_bytes(id encoder, const void *bytes, NSUInteger length,
                                 NSUInteger index) {
    OBJC_SELECTOR("setBytes:length:atIndex:");
    OBJC_SEND(void, const void *, NSUInteger, NSUInteger)(encoder, selector, bytes, length, index);
}

/* A multiple of 16 bytes. */
static inline void mtl_set_threadgroup_memory(id encoder, NSUInteger length, NSUInteger index) {
    OBJC_SELECTOR("setThreadgroupMemoryLength:atIndex:");
    OBJC_SEND(void, NSUInteger, NSUInteger)(encoder, selector, length, index);
}

static inline void mtl_dispatch(id encoder, MTLSize groups, MTLSize threads) {
    OBJC_SELECTOR("dispatchThreadgroups:threadsPerThreadgroup:");
    OBJC_SEND(void, MTLSize, MTLSize)(encoder, selector, groups, threads);
}

/* The grid is three uint32_t that the GPU reads at `offset` of `buffer`. */
static inline void mtl_dispatch_indirect(id encoder, id buffer, NSUInteger offset,
                                         MTLSize threads) {
    OBJC_SELECTOR("dispatchThreadgroupsWithIndirectBuffer:indirectBufferOffset:"
                  "threadsPerThreadgroup:");
    OBJC_SEND(void, id, NSUInteger, MTLSize)(encoder, selector, buffer, offset, threads);
}

static inline void mtl_barrier_scope(id encoder, NSUInteger scope) {
    OBJC_SELECTOR("memoryBarrierWithScope:");
    OBJC_SEND(void, NSUInteger)(encoder, selector, scope);
}

/* Orders only the accesses to the listed buffers. */
static inline void mtl_barrier_resources(id encoder, const id *resources, NSUInteger count) {
    OBJC_SELECTOR("memoryBarrierWithResources:count:");
    OBJC_SEND(void, const id *, NSUInteger)(encoder, selector, resources, count);
}

static inline void mtl_end_encoding(id encoder) {
    OBJC_SELECTOR("endEncoding");
    OBJC_SEND(void)(encoder, selector);
}

/* ---- Shared events ---- */

static inline uint64_t mtl_event_value(id event) {
    OBJC_SELECTOR("signaledValue");
    return OBJC_SEND(uint64_t)(event, selector);
}

static inline void mtl_event_set_value(id event, uint64_t value) {
    OBJC_SELECTOR("setSignaledValue:");
    OBJC_SEND(void, uint64_t)(event, selector, value);
}

/* false when the time ran out first. */
static inline bool mtl_event_wait(id event, uint64_t value, uint64_t milliseconds) {
    OBJC_SELECTOR("waitUntilSignaledValue:timeoutMS:");
    return OBJC_SEND(bool, uint64_t, uint64_t)(event, selector, value, milliseconds);
}

#endif
