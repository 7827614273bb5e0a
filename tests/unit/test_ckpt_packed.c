/* Packed files: the same weights as the folder, damage found, nothing left behind on failure. */
#include "ckpt_fixture.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "ckpt/hash.h"
#include "ckpt/packed.h"
#include "ckpt/table.h"

static void pack_ok(const char *in, const char *out) {
    lily_err err = {0};
    if (ckpt_pack(in, out, NULL, &err) != 0) fail_msg("%s", err.msg);
}

static void same_mat(const struct mat *a, const struct mat *b) {
    assert_int_equal(a->rows, b->rows);
    assert_int_equal(a->cols, b->cols);
    assert_int_equal(a->bits, b->bits);
    size_t groups = (size_t)a->rows * (size_t)(a->cols / 64);
    assert_memory_equal(a->data, b->data, (size_t)a->rows * mat_row_bytes(a));
    assert_memory_equal(a->scales, b->scales, 2 * groups);
    assert_memory_equal(a->biases, b->biases, 2 * groups);
}

static void same_weights(const struct ckpt *x, const struct ckpt *y) {
    const struct weights *a = ckpt_weights(x), *b = ckpt_weights(y);
    assert_ptr_equal(a->shape, b->shape);
    assert_int_equal(a->layers, b->layers);
    assert_int_equal(a->vocab_used, b->vocab_used);
    struct tensor_walk walk;
    tensor_walk_start(&walk, a->shape, a->layers);
    int n = 0;
    for (; tensor_walk_next(&walk); n++) {
        const struct mat *m = tensor_mats(walk.role, a, walk.layer);
        for (int32_t i = 0; m && i < tensor_items(walk.role, a->shape); i++) {
            same_mat(&m[i], &tensor_mats(walk.role, b, walk.layer)[i]);
        }
        const float *f = tensor_floats(walk.role, a, walk.layer);
        size_t count =
            (size_t)tensor_rows(walk.role, a->shape) * (size_t)tensor_cols(walk.role, a->shape);
        if (f) assert_memory_equal(f, tensor_floats(walk.role, b, walk.layer), 4 * count);
    }
    assert_true(n > 4 * 18);
}

static void test_same_weights_and_texts(void **state) {
    (void)state;
    const char *folder = fx_synth("a"), *packed = fx_path("a.lily");
    pack_ok(folder, packed);
    struct ckpt *x = fx_load_ok(folder, false), *y = fx_load_ok(packed, false);
    assert_string_equal(ckpt_kind(y), "packed file");
    assert_string_equal(ckpt_path(y), packed);
    same_weights(x, y);
    const char *const names[] = {"config.json", "tokenizer.json", "tokenizer_config.json",
                                 "generation_config.json", "chat_template.jinja"};
    for (int i = 0; i < 5; i++) {
        size_t n = 0, m = 0;
        const char *a = ckpt_text(x, names[i], &n), *b = ckpt_text(y, names[i], &m);
        assert_int_equal(n, m);
        assert_int_equal(!a, !b);
        if (a) assert_memory_equal(a, b, n);
    }
    /* Experts lie together, at pages. */
    const struct moe_weights *moe = &ckpt_weights(y)->layer[1].moe;
    assert_int_equal((uintptr_t)moe->gate[7].data % PACKED_ALIGN, 0);
    assert_ptr_equal((const uint8_t *)moe->gate[7].scales, moe->gate[7].data + 64 * 128);
    assert_ptr_equal(moe->up[7].data, (const uint8_t *)moe->gate[7].biases + 64 * 4 * 2);
    assert_ptr_equal(moe->down[7].data, (const uint8_t *)moe->up[7].biases + 64 * 4 * 2);
    assert_true(moe->gate[8].data - moe->gate[7].data == moe->gate[1].data - moe->gate[0].data);
    ckpt_free(x);
    ckpt_free(y);
}

static void test_packing_a_packed_file(void **state) {
    (void)state;
    pack_ok(fx_synth("b"), fx_path("b.lily"));
    pack_ok(fx_path("b.lily"), fx_path("b2.lily"));
    struct ckpt *x = fx_load_ok(fx_path("b.lily"), false);
    struct ckpt *y = fx_load_ok(fx_path("b2.lily"), false);
    same_weights(x, y);
    ckpt_free(x);
    /* Onto itself, while it is open. */
    pack_ok(fx_path("b2.lily"), fx_path("b2.lily"));
    x = fx_load_ok(fx_path("b2.lily"), false);
    same_weights(x, y);
    ckpt_free(x);
    ckpt_free(y);
}

/* ---- damage ---------------------------------------------------------------------------------- */

static void test_damage(void **state) {
    (void)state;
    const char *path = fx_path("d.lily");
    pack_ok(fx_synth("d"), path);
    size_t n;
    char *data = fx_read(path, &n);
    fx_write(path, data, n - 1);
    fx_refused(path, LILY_EFORMAT, "d.lily", "cut short", "pack it again", NULL);
    fx_write(path, data, 63);
    fx_refused(path, LILY_EFORMAT, "no packed file's header", NULL);
    fx_write(path, data, 64);
    fx_refused(path, LILY_EFORMAT, "d.lily: found 64 bytes", NULL);
    data[8] = 9;
    fx_write(path, data, n);
    fx_refused(path, LILY_EFORMAT, "layout version 9, expected 1", "lily pack", NULL);
    data[8] = 1;
    /* Every header field and a place in the directory. */
    for (size_t at = 12; at < 80; at += 3) {
        if (at >= 56 && at < 64) continue; /* not used */
        data[at] = (char)(data[at] ^ 0x10);
        fx_write(path, data, n);
        fx_refused(path, LILY_EFORMAT, "d.lily", NULL);
        data[at] = (char)(data[at] ^ 0x10);
    }
    memcpy(data, "LILYPICK", 8);
    fx_write(path, data, n);
    fx_refused(path, LILY_EMODEL, "unknown kind", NULL);
    free(data);
}

static json_t *inspection(const char *path) {
    lily_err err = {0};
    char *text;
    if (ckpt_inspect(path, NULL, &text, &err) != 0) fail_msg("%s", err.msg);
    json_t *root = json_loads(text, 0, NULL);
    assert_non_null(root);
    free(text);
    return root;
}

/* A flipped bit in the data is not seen by loading, which reads none of it, but by inspecting. */
static void test_flipped_data(void **state) {
    (void)state;
    const char *path = fx_path("f.lily");
    pack_ok(fx_synth("f"), path);
    json_t *root = inspection(path);
    assert_true(json_is_true(json_object_get(root, "ok")));
    json_decref(root);
    size_t n;
    char *data = fx_read(path, &n);
    struct ckpt *c = fx_load_ok(path, false);
    /* The last byte of an expert in the middle of layer 2. */
    size_t at = (size_t)((const uint8_t *)(ckpt_weights(c)->layer[2].moe.down[20].biases + 256) -
                         (const uint8_t *)ckpt_text(c, "config.json", NULL));
    ckpt_free(c);
    root = json_loadb(data + 64, *(uint32_t *)(void *)(data + 12), 0, NULL);
    json_t *texts = json_array_get(json_object_get(root, "texts"), 0);
    at += (size_t)json_integer_value(json_object_get(texts, "offset"));
    json_decref(root);
    data[at - 1] = (char)(data[at - 1] ^ 1);
    fx_write(path, data, n);
    ckpt_free(fx_load_ok(path, false));
    root = inspection(path);
    assert_true(json_is_false(json_object_get(root, "ok")));
    fx_message_has(json_string_value(json_array_get(json_object_get(root, "faults"), 0)),
                   "f.lily: section layers.2.experts.0: found SHA-256");
    json_decref(root);
    free(data);
}

/* Stores an edited directory with a right checksum: what is left are the reader's own checks. */
static void forge(const char *path, const char *data, size_t n, json_t *directory) {
    char *text = json_dumps(directory, JSON_COMPACT);
    size_t old = *(const uint32_t *)(const void *)(data + 12), now = strlen(text);
    size_t begin = (64 + old + 4095) / 4096 * 4096, moved = (64 + now + 4095) / 4096 * 4096;
    size_t size = n - begin + moved;
    char *file = calloc(1, size);
    memcpy(file, data, 24);
    memcpy(file + 64, text, now);
    memcpy(file + moved, data + begin, n - begin);
    uint32_t length = (uint32_t)now;
    uint64_t total = size;
    memcpy(file + 12, &length, 4);
    memcpy(file + 16, &total, 8);
    struct hash *h = hash_new();
    hash_add(h, file, 24);
    hash_add(h, file + 64, now);
    char hex[HASH_HEX];
    hash_end_hex(h, hex);
    for (int i = 0; i < 32; i++) {
        unsigned byte;
        assert_int_equal(sscanf(hex + 2 * i, "%2x", &byte), 1);
        file[24 + i] = (char)byte;
    }
    fx_write(path, file, size);
    free(file);
    free(text);
    json_decref(directory);
}

static json_t *entry(json_t *root, const char *list, size_t i) {
    return json_array_get(json_object_get(root, list), i);
}

static void test_forged_directories(void **state) {
    (void)state;
    const char *path = fx_path("g.lily");
    pack_ok(fx_synth("g"), path);
    size_t n;
    char *data = fx_read(path, &n);
    json_t *root = json_loadb(data + 64, *(uint32_t *)(void *)(data + 12), 0, NULL);
    assert_non_null(root);
    forge(path, data, n, json_deep_copy(root));
    ckpt_free(fx_load_ok(path, false)); /* forging nothing is accepted */
    for (int k = 0; k < 12; k++) {
        json_t *d = json_deep_copy(root);
        switch (k) {
        case 0:
            json_object_set_new(d, "layers", json_integer(8));
            break;
        case 1:
            json_object_set_new(d, "layers", json_integer(-4));
            break;
        case 2:
            json_object_set_new(d, "vocab_used", json_integer(5000));
            break;
        case 3:
            json_object_set_new(entry(d, "tensors", 3), "offset", json_integer(1));
            break;
        case 4:
            json_object_set_new(entry(d, "tensors", 3), "bits", json_integer(16));
            break;
        case 5:
            json_object_set_new(entry(d, "sections", 1), "offset", json_integer(1));
            break;
        case 6:
            json_object_set_new(entry(d, "sections", 1), "sha256", json_string("00"));
            break;
        case 7:
            json_object_set_new(entry(d, "texts", 0), "bytes", json_integer(1 << 30));
            break;
        case 8:
            json_object_set_new(entry(d, "texts", 0), "name", json_string("../x"));
            break;
        case 9:
            json_array_clear(json_object_get(d, "tensors"));
            break;
        case 10:
            json_array_clear(json_object_get(d, "sections"));
            break;
        case 11:
            json_object_set_new(d, "source", json_integer(1));
            break;
        }
        forge(path, data, n, d);
        fx_refused(path, LILY_EFORMAT, "g.lily: directory: found ", "pack the checkpoint again",
                   NULL);
    }
    json_t *d = json_deep_copy(root);
    json_object_set_new(d, "shape", json_string("qwen9"));
    forge(path, data, n, d);
    fx_refused(path, LILY_EMODEL, "the shape qwen9", NULL);
    json_decref(root);
    free(data);
}

/* ---- failures while writing ------------------------------------------------------------------ */

/* Stops as soon as that many bytes are done. */
static int stop_at(void *arg, uint64_t done, uint64_t total) {
    (void)total;
    return done >= *(uint64_t *)arg;
}

/* At once, while scales are checked, and in the midst of 6.8 MB of writing. */
static void test_interrupted(void **state) {
    (void)state;
    const char *folder = fx_synth("i");
    mkdir(fx_path("out"), 0755);
    const uint64_t bytes[] = {0, 1 << 18, 3 << 20, 6 << 20};
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++) {
        uint64_t at = bytes[i];
        struct ckpt_options o = {.progress = stop_at, .progress_arg = &at};
        lily_err err = {0};
        struct ckpt *c;
        assert_int_equal(ckpt_pack(folder, fx_path("out/x.lily"), &o, &err), LILY_ECANCELED);
        fx_only(fx_path("out"), NULL);
        if (i < 2) assert_int_equal(ckpt_load(folder, &o, &c, &err), LILY_ECANCELED);
        for (int packed = 0; packed < 2; packed++) {
            struct ckpt_synth_options s = {.shape = "mini",
                                           .layers = 4,
                                           .packed = packed,
                                           .progress = stop_at,
                                           .progress_arg = &at};
            assert_int_equal(ckpt_synth(fx_path("out/s"), &s, &err), LILY_ECANCELED);
            fx_only(fx_path("out"), NULL);
        }
    }
    /* An older file of that name stays as it was. */
    fx_write_text(fx_path("out/x.lily"), "old");
    uint64_t at = 3 << 20;
    struct ckpt_options o = {.progress = stop_at, .progress_arg = &at};
    lily_err err = {0};
    assert_int_equal(ckpt_pack(folder, fx_path("out/x.lily"), &o, &err), LILY_ECANCELED);
    size_t n;
    char *data = fx_read(fx_path("out/x.lily"), &n);
    assert_string_equal(data, "old");
    free(data);
    fx_only(fx_path("out"), "x.lily", NULL);
}

/* Kills the program that asks. */
static int die_at(void *arg, uint64_t done, uint64_t total) {
    (void)total;
    if (done >= *(uint64_t *)arg) raise(SIGKILL);
    return 0;
}

/* Not even kill -9 leaves 20 GB lying about, where the file system has files without a name. */
static void test_killed(void **state) {
    (void)state;
#ifdef O_TMPFILE
    const char *folder = fx_synth("k"), *out = fx_path("killed");
    mkdir(out, 0755);
    int fd = open(out, O_TMPFILE | O_WRONLY, 0600);
    if (fd < 0) skip();
    close(fd);
    uint64_t at = 3 << 20;
    pid_t child = fork();
    if (child == 0) {
        struct ckpt_options o = {.progress = die_at, .progress_arg = &at};
        lily_err err;
        _exit(ckpt_pack(folder, fx_path("killed/x.lily"), &o, &err) ? 1 : 0);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    fx_only(out, NULL);
#else
    skip();
#endif
}

/* A limit on the size of files stands for a disk that fills up half way. */
static void test_disk_full(void **state) {
    (void)state;
    const char *folder = fx_synth("full");
    mkdir(fx_path("small"), 0755);
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit old, low = {.rlim_cur = 1 << 20, .rlim_max = RLIM_INFINITY};
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    low.rlim_max = old.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &low), 0);
    lily_err pack = {0}, synth = {0};
    struct ckpt_synth_options s = {.shape = "mini", .layers = 4};
    int packed = ckpt_pack(folder, fx_path("small/x.lily"), NULL, &pack);
    int synthesised = ckpt_synth(fx_path("small/s"), &s, &synth);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(packed, LILY_ENOSPC);
    fx_message_has(pack.msg, "small/x.lily: found the disk");
    fx_message_has(pack.msg, "expected room for 0.01 GB; free space");
    assert_int_equal(synthesised, LILY_ENOSPC);
    fx_message_has(synth.msg, "small/s: found the disk");
    fx_only(fx_path("small"), NULL);
}

static void test_wrong_targets(void **state) {
    (void)state;
    const char *folder = fx_synth("w");
    lily_err err = {0};
    assert_int_equal(ckpt_pack(folder, folder, NULL, &err), LILY_EINVAL);
    fx_message_has(err.msg, "found a folder, expected the name of a file");
    assert_int_equal(ckpt_pack(folder, fx_path("no/such/x.lily"), NULL, &err), LILY_ENOENT);
    struct ckpt_synth_options s = {.shape = "mini", .layers = 4};
    assert_int_equal(ckpt_synth(folder, &s, &err), LILY_EINVAL);
    fx_message_has(err.msg, "something there already");
    assert_int_equal(ckpt_synth(fx_path("no/such/s"), &s, &err), LILY_ENOENT);
    /* Not onto the input's own files, by whatever name. */
    size_t before, after;
    char *shard = fx_read(fx_path("w/model.safetensors"), &before);
    assert_int_equal(symlink(fx_path("w/model.safetensors"), fx_path("alias")), 0);
    assert_int_equal(link(fx_path("w/config.json"), fx_path("config")), 0);
    const char *const own[] = {fx_path("w/./model.safetensors"), fx_path("alias"),
                               fx_path("config")};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        assert_int_equal(ckpt_pack(folder, own[i], NULL, &err), LILY_EINVAL);
        fx_message_has(err.msg, "found a file of the checkpoint to pack, expected another");
    }
    char *kept = fx_read(fx_path("w/model.safetensors"), &after);
    assert_int_equal(before, after);
    assert_memory_equal(shard, kept, after);
    free(shard);
    free(kept);
    /* Nothing but a file of its own is ever replaced, and a name must name a file. */
    assert_int_equal(mkfifo(fx_path("pipe"), 0600), 0);
    const char *const targets[] = {fx_path("pipe"), fx_path("slash/"), ""};
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        assert_int_equal(ckpt_pack(folder, targets[i], NULL, &err), LILY_EINVAL);
        fx_message_has(err.msg, ", expected ");
    }
    s.packed = true;
    assert_int_equal(ckpt_synth(fx_path("pipe"), &s, &err), LILY_EINVAL);
    s.packed = false;
    /* A folder's name may end in a slash. */
    assert_int_equal(ckpt_synth(fx_path("slashed//"), &s, &err), 0);
    assert_true(file_is_dir(fx_path("slashed")));
    s.layers = 6;
    assert_int_equal(ckpt_synth(fx_path("n"), &s, &err), LILY_EINVAL);
    s.layers = 12;
    assert_int_equal(ckpt_synth(fx_path("n"), &s, &err), LILY_EINVAL);
    s.shape = "tiny";
    assert_int_equal(ckpt_synth(fx_path("n"), &s, &err), LILY_EINVAL);
    fx_message_has(err.msg, "found tiny, expected qwen3.6-35b-a3b or mini");
    /* No permission: root may write everywhere, so be nobody for a moment. */
    mkdir(fx_path("ro"), 0555);
    chmod(fx_root, 0755);
    bool root = geteuid() == 0;
    if (root) assert_int_equal(seteuid(65534), 0);
    int rc = ckpt_pack(folder, fx_path("ro/x.lily"), NULL, &err);
    if (root) assert_int_equal(seteuid(0), 0);
    assert_int_equal(rc, LILY_EPERM);
    fx_message_has(err.msg, "ro/x.lily: cannot create: Permission denied");
}

/* ---- identity -------------------------------------------------------------------------------- */

static void test_identity(void **state) {
    (void)state;
    const char *folder = fx_synth("id");
    pack_ok(folder, fx_path("id.lily"));
    struct ckpt *a = fx_load_ok(folder, false), *b = fx_load_ok(folder, false);
    struct ckpt *p = fx_load_ok(fx_path("id.lily"), false);
    assert_int_equal(strlen(ckpt_identity(a)), 64);
    assert_string_equal(ckpt_identity(a), ckpt_identity(b));
    assert_string_not_equal(ckpt_identity(a), ckpt_identity(p));
    ckpt_free(b);
    struct fx_tensors t = fx_open(fx_path("id/model.safetensors"));
    t.data[0] ^= 1; /* the first sample */
    fx_store(fx_path("id/model.safetensors"), &t, 0);
    b = fx_load_ok(folder, false);
    assert_string_not_equal(ckpt_identity(a), ckpt_identity(b));
    ckpt_free(a);
    ckpt_free(b);
    /* A packed file's covers all data: another seed, another identity. */
    lily_err err = {0};
    struct ckpt_synth_options s = {.shape = "mini", .layers = 4, .seed = 4, .packed = true};
    assert_int_equal(ckpt_synth(fx_path("id4.lily"), &s, &err), 0);
    b = fx_load_ok(fx_path("id4.lily"), false);
    assert_string_not_equal(ckpt_identity(p), ckpt_identity(b));
    ckpt_free(p);
    ckpt_free(b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_weights_and_texts),
        cmocka_unit_test(test_packing_a_packed_file),
        cmocka_unit_test(test_damage),
        cmocka_unit_test(test_flipped_data),
        cmocka_unit_test(test_forged_directories),
        cmocka_unit_test(test_interrupted),
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_disk_full),
        cmocka_unit_test(test_wrong_targets),
        cmocka_unit_test(test_identity),
    };
    return cmocka_run_group_tests(tests, fx_setup, fx_teardown);
}
