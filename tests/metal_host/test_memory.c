/* Memory: a packed file's pages are used as they are; every byte the device holds is on the list of
 * buffers, whose sum is weights as stored, scratch and sessions: no dequantised copy exists. */
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/metal/metal.h"
#include "ckpt/load.h"
#include "ckpt/packed.h"
#include "harness.h"

static const int32_t ids[] = {3, 99, 1024, 7, 2000, 55, 8};
enum { N = sizeof ids / sizeof *ids };

/* A packed synthetic checkpoint read to an address that a Mac's mapping would have. */
struct packed {
    struct ckpt ckpt;
    uint8_t *bytes;
    size_t size;
};

static struct packed packed_new(void) {
    static char path[] = "/tmp/lily-metal-host-XXXXXX";
    struct ckpt_synth_options synth = {.shape = "mini", .seed = 11, .packed = true};
    struct packed p = {0};
    lily_err err;
    int fd = mkstemp(path);
    struct stat st;
    ok(ckpt_synth(path, &synth, &err), &err);
    assert_int_equal(stat(path, &st), 0);
    p.size = ((size_t)st.st_size + METAL_PAGE - 1) / METAL_PAGE * METAL_PAGE;
    p.bytes = aligned_alloc(METAL_PAGE, p.size);
    FILE *f = fopen(path, "rb");
    assert_true(fread(p.bytes, 1, (size_t)st.st_size, f) == (size_t)st.st_size);
    fclose(f);
    close(fd);
    unlink(path);
    struct faults faults = {.err = &err};
    p.ckpt.path = path;
    ok(packed_open_bytes(&p.ckpt, p.bytes, (size_t)st.st_size, &faults), &err);
    p.ckpt.weights.map = p.bytes;
    return p;
}

static void packed_free(struct packed *p) {
    p->ckpt.path = NULL;
    load_close(&p->ckpt);
    free(p->bytes);
}

static void a_packed_file_is_not_copied(void **state) {
    (void)state;
    struct packed p = packed_new();
    struct weights copied = p.ckpt.weights;
    size_t vocab = (size_t)copied.shape->vocab;
    float *a = calloc(vocab, sizeof *a), *b = calloc(vocab, sizeof *b);
    emulate(false, 0);
    struct bench x = bench_open(&backend_metal, &p.ckpt.weights, NULL);
    assert_true(x.m->layout.tensors.in_place);
    assert_int_equal(x.m->buffers.copied, 0);
    for (int32_t i = 0; i < x.m->layout.tensors.windows; i++) {
        uint8_t *at = buffers_contents(&x.m->buffers, x.m->layout.first_window + i);
        assert_true(at >= p.bytes && at < p.bytes + p.size);
    }
    bench_prefill(&x, ids, N, a);
    bench_close(&x);
    copied.map = NULL;
    x = bench_open(&backend_metal, &copied, NULL);
    assert_int_equal(x.m->buffers.copied, x.m->layout.tensors.mat_bytes);
    bench_prefill(&x, ids, N, b);
    assert_memory_equal(a, b, vocab * sizeof *a);
    bench_close(&x);
    /* In windows as small as a device may ask for, the same. */
    struct metal_emu_options o = metal_emu_defaults();
    o.checked = false;
    o.max_buffer = 4 << 20;
    metal_emu_configure(&o);
    struct backend_options small = {.max_sessions = 1, .max_context = 64};
    x = bench_open(&backend_metal, &p.ckpt.weights, &small);
    assert_true(x.m->layout.tensors.windows > 2);
    bench_prefill(&x, ids, N, b);
    assert_memory_equal(a, b, vocab * sizeof *a);
    bench_close(&x);
    free(a);
    free(b);
    packed_free(&p);
    nothing_found();
}

static void every_byte_is_on_the_list(void **state) {
    (void)state;
    const struct weights *w = ckpt_weights(stand_in());
    struct buf list = {0};
    emulate(false, 0);
    struct bench x = bench_open(&backend_metal, w, NULL);
    uint64_t listed = 0, weights = 0, held = mtl_device_allocated(x.m->device.device);
    assert_true(buffers_list(&x.m->buffers, &list));
    for (char *line = strtok(list.data, "\n"); line; line = strtok(NULL, "\n")) {
        uint64_t bytes = strtoull(strrchr(line, ' '), NULL, 10);
        listed += bytes;
        if (strncmp(line, "weights ", 8) == 0) weights += bytes;
    }
    struct backend_stats stats;
    x.b->stats(x.m, &stats);
    assert_int_equal(listed, held);
    assert_int_equal(listed, weights + x.m->layout.bytes[METAL_SMALL] + stats.scratch_bytes +
                                 stats.session_bytes);
    assert_true(weights < x.m->layout.tensors.mat_bytes + (1 << 20));
    /* Steps make nothing. */
    bench_prefill(&x, ids, N, NULL);
    bench_step(&x, 4, NULL, 0, NULL);
    assert_int_equal(mtl_device_allocated(x.m->device.device), held);
    buf_free(&list);
    bench_close(&x);
    nothing_found();
    assert_int_equal(metal_emu_live_objects(), 0);
}

static int count_calls(void *arg, uint64_t done, uint64_t total) {
    assert_true(done <= total);
    ++*(int *)arg;
    return *(int *)arg == 5;
}

static void copying_can_be_interrupted(void **state) {
    (void)state;
    int calls = 0;
    struct backend_options o = {
        .max_sessions = 1, .max_context = 64, .progress = count_calls, .progress_arg = &calls};
    struct backend_model *m;
    lily_err err;
    emulate(false, 0);
    assert_int_equal(backend_metal.open(ckpt_weights(stand_in()), &o, &m, &err), LILY_ECANCELED);
    assert_int_equal(calls, 5);
    assert_int_equal(metal_emu_live_objects(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_packed_file_is_not_copied),
        cmocka_unit_test(every_byte_is_on_the_list),
        cmocka_unit_test(copying_can_be_interrupted),
    };
    return cmocka_run_group_tests_name("metal memory", tests, NULL, NULL);
}
