#include "backend/metal/command.h"

int metal_command_begin(const struct metal_device *d, const char *label, struct metal_command *out,
                        lily_err *err) {
    out->buffer = objc_retain(mtl_command_buffer_unretained(d->queue));
    if (!out->buffer) {
        return ERR(err, LILY_EBACKEND,
                   "%s: found no command buffer, expected one; try again, and restart the program "
                   "if that does not help",
                   label);
    }
    mtl_set_label(out->buffer, ns_string(label));
    return LILY_OK;
}

void metal_command_commit(struct metal_command *c) {
    mtl_commit(c->buffer);
}

/* What the GPU's refusal means for the person in front of it. */
static const char *advice(NSInteger code) {
    switch (code) {
    case MTLCommandBufferErrorTimeout:
        return "the GPU was busy too long: close programs that use it and try again";
    case MTLCommandBufferErrorOutOfMemory:
        return "the GPU's memory is full: close other programs or ask for a shorter context";
    case MTLCommandBufferErrorAccessRevoked:
    case MTLCommandBufferErrorNotPermitted:
        return "the GPU refuses this process, after a fault or in the background: try again";
    case MTLCommandBufferErrorPageFault:
    case MTLCommandBufferErrorInvalidResource:
        return "a kernel touched memory it does not have: please report it";
    default:
        return "try again; if it repeats, restart the machine and report it";
    }
}

int metal_command_wait(struct metal_command *c, double *seconds, lily_err *err) {
    mtl_wait_completed(c->buffer);
    int rc = LILY_OK;
    *seconds = mtl_gpu_end_time(c->buffer) - mtl_gpu_start_time(c->buffer);
    if (mtl_status(c->buffer) != MTLCommandBufferStatusCompleted) {
        id error = mtl_error(c->buffer);
        const char *text = error ? ns_error_text(error) : NULL;
        NSInteger code = error ? ns_error_code(error) : 0;
        rc =
            ERR(err, LILY_EBACKEND, "Metal: found error %ld of the GPU (%.200s), expected none; %s",
                (long)code, text ? text : "no text", advice(code));
    }
    objc_release(c->buffer);
    c->buffer = NULL;
    return rc;
}
