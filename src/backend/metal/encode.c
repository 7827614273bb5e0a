#include "backend/metal/encode.h"

static void encode_barrier(const struct graph *g, const struct graph_dispatch *d, const id *buffers,
                           id encoder) {
    id listed[GRAPH_BARRIER_LIST];
    if (d->barrier == GRAPH_SCOPE) {
        mtl_barrier_scope(encoder, MTLBarrierScopeBuffers);
    } else if (d->barrier > 0) {
        for (int32_t i = 0; i < d->barrier; i++) {
            listed[i] = buffers[g->listed[d->first_barrier + i]];
        }
        mtl_barrier_resources(encoder, listed, (NSUInteger)d->barrier);
    }
}

static void encode_dispatch(const struct metal_device *device, const struct graph *g,
                            const struct graph_dispatch *d, const id *buffers, id encoder) {
    mtl_set_pipeline(encoder, device->pipeline[d->kernel]);
    for (int32_t i = 0; i < d->bindings; i++) {
        const struct graph_binding *b = &g->binding[d->first_binding + i];
        if (b->buffer < 0) {
            mtl_set_bytes(encoder, g->args + d->args_at, d->args_bytes, (NSUInteger)b->index);
        } else {
            mtl_set_buffer(encoder, buffers[b->buffer], b->offset, (NSUInteger)b->index);
        }
    }
    mtl_dispatch(encoder, (MTLSize){d->groups[0], d->groups[1], d->groups[2]},
                 (MTLSize){d->threads[0], d->threads[1], d->threads[2]});
}

int metal_encode(const struct metal_device *d, const struct graph *g, int32_t from, int32_t to,
                 const id *buffers, id command_buffer, lily_err *err) {
    id encoder = mtl_compute_encoder(command_buffer, MTLDispatchTypeConcurrent);
    if (!encoder) {
        return ERR(err, LILY_EBACKEND,
                   "Metal: found no compute encoder, expected one; try again, and restart the "
                   "program if that does not help");
    }
    for (int32_t i = from; i < to; i++) {
        /* A new encoder orders what came before it by itself. */
        if (i > from) encode_barrier(g, &g->dispatch[i], buffers, encoder);
        encode_dispatch(d, g, &g->dispatch[i], buffers, encoder);
    }
    mtl_end_encoding(encoder);
    return LILY_OK;
}

int metal_run(const struct metal_device *d, const char *label, const struct graph *g, int32_t from,
              int32_t to, const id *buffers, double *seconds, lily_err *err) {
    struct metal_command c;
    *seconds = 0;
    int rc = metal_command_begin(d, label, &c, err);
    if (rc != LILY_OK) return rc;
    rc = metal_encode(d, g, from, to, buffers, c.buffer, err);
    /* An empty command buffer ends like any other. */
    metal_command_commit(&c);
    int ended = metal_command_wait(&c, seconds, rc == LILY_OK ? err : NULL);
    return rc == LILY_OK ? ended : rc;
}
