/* A decode step through the portable kernels: any card, any number of slots. */
#include "backend/cuda/cuda.h"

/* Its kernels are opened with the model, since prompts need them too. */
static int open_portable(struct backend_model *m, bool *usable, lily_err *err) {
    (void)m, (void)err;
    *usable = true;
    return LILY_OK;
}

static void close_portable(struct backend_model *m) {
    (void)m;
}

static bool takes(const struct backend_model *m, const struct cuda_step *step) {
    (void)m, (void)step;
    return true;
}

static int queue(struct backend_model *m, struct cuda_step *step, lily_err *err) {
    int32_t n = step->n, hidden = model_shape(m)->hidden;
    /* One row is as fast in float32; for several the tensor cores read the codes once. */
    struct cuda_run run = {.x = &m->x,
                           .slots = step->slots,
                           .slots_device = step->slots_device,
                           .n_slots = n,
                           .rows_per_slot = 1,
                           .matrix = n > 1};
    bool head = false;
    for (int32_t i = 0; i < n; i++) head |= step->slots[i].sample || step->slots[i].want_logits;
    int rc = cuda_run_layers(m, &run, err);
    if (rc == LILY_OK) rc = cuda_check_rows(m, m->x.x, n, hidden, 1, 0, err);
    if (rc == LILY_OK && head) rc = cuda_run_head(m, &run, 0, n, err);
    return rc == LILY_OK
               ? cuda_run_sampling(m, step->slots_device, n, head, step->results_device, err)
               : rc;
}

const struct cuda_path cuda_path_portable = {.name = "portable",
                                             .open = open_portable,
                                             .close = close_portable,
                                             .takes = takes,
                                             .queue = queue};
