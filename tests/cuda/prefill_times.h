/* The second half of prefill_bench.cu: times, each beside the bound of what it must compute and
 * move. Ceilings as measured on an H200: 790 TFLOP/s in bf16 products, 4,640 GB/s. */
enum { ROTATED = 4 }; /* copies of a small matrix, so that it comes from memory as in a model */

static const int LENGTHS[] = {512, 1024, 2048, 4096};

static void report(const char *what, const char *tile, int rows, double us, double flop,
                   double bytes) {
    double bound = std::max(flop / 790e6, bytes / 4640e3);
    printf("%-22s %-8s n %5d %9.1f us %7.1f TFLOP/s %7.0f GB/s  bound %8.1f us = %3.0f %%\n", what,
           tile, rows, us, flop / us / 1e6, bytes / us / 1e3, bound, 100 * bound / us);
}

static double mat_bytes(const cuda_mat &m) {
    return (double)m.rows * m.cols * (m.bits / 8.0 + 4.0 / 64);
}

static void time_product(const char *what, int outputs, int cols, int rows, const dense_tile &t) {
    cuda_mat w[ROTATED];
    for (cuda_mat &m : w) m = matrix(outputs, cols, CUDA_WIDE, 1);
    bf16 *x = bf16s((size_t)rows * (size_t)cols, -1, 1);
    fp16 *out = take<fp16>((size_t)rows * (size_t)outputs);
    double us = microseconds(8, [&](int i) { run_dense(t, x, w[i % ROTATED], out, rows); });
    double n = rows;
    report(what, t.name, rows, us, 2.0 * n * outputs * cols,
           mat_bytes(w[0]) + n * cols * 2 + n * outputs * 2);
    release();
}

static void time_gemm() {
    for (int rows : LENGTHS) {
        if (only && rows != only) continue;
        for (int t = 2; t < 6; t++) {
            if (t == 2 && rows > 1024) continue;
            time_product("qkvz", CONV_DIM + V_DIM, H, rows, DENSE_TILES[t]);
            time_product("attention qkv", 2 * Q_DIM + 2 * KV_DIM, H, rows, DENSE_TILES[t]);
            time_product("out", H, V_DIM, rows, DENSE_TILES[t]);
        }
        size_t n = (size_t)rows * H;
        float *x = floats(n, -1, 1), *weight = floats(H, 0.5f, 1.5f);
        fp16 *add = halves(n, -1, 1);
        bf16 *ordered = take<bf16>(n), *high = take<bf16>(n), *low = take<bf16>(n);
        float *sums = take<float>(n / 64);
        int32_t *none = nullptr;
        double us = microseconds(10, [&](int) {
            RUN(prompt_norm, rows, 1, 256, 0, x, add, weight, ordered, high, low, sums, none);
        });
        report("norm with sum", "", rows, us, 0, (double)n * 16);
        release();
    }
}

static void time_decisive() {
    const int lengths[] = {16, 64, 512, 1024, 2048, 4096};
    for (int rows : lengths) {
        if (only && rows != only) continue;
        float *x = floats((size_t)rows * H, -2, 2), *out = take<float>((size_t)rows * 2 * 320);
        decisive_input_rows r = split_rows(x, rows, H);
        cuda_mat of[] = {matrix(EXPERTS + 1, H, CUDA_BYTE, 1),
                         matrix(2 * V_HEADS, H, CUDA_WIDE, 1)};
        for (const cuda_mat &w : of) {
            for (const decisive_tile &t : DECISIVE_TILES) {
                if (rows / t.n > 264 || t.n > std::max(rows, 16)) continue;
                char name[16];
                snprintf(name, sizeof name, "%dx%d", w.rows, t.n);
                double us = microseconds(8, [&](int) { run_decisive(t, r, w, out, rows); });
                report("decisive", name, rows, us, 4.0 * rows * w.rows * H,
                       4.0 * rows * H + mat_bytes(w));
            }
        }
        release();
    }
}

static void time_moe(int rows, int first_tile, int end_tile) {
    moe m = make_moe(rows, EXPERTS);
    int pairs = rows * TOP_K, used = std::min(pairs, (int)EXPERTS);
    bf16 *x = bf16s((size_t)rows * H, -1, 1),
         *hidden = take<bf16>((size_t)pairs * INNER + (size_t)rows * SHARED);
    fp16 *out = take<fp16>((size_t)pairs * H), *own = take<fp16>((size_t)rows * H);
    float *residual = floats((size_t)rows * H, -1, 1);
    double n = rows, each = pairs;
    double us = microseconds(10, [&](int) {
        RUN(prompt_route, blocks(rows, 4), 1, 128, 0, m.scores, m.routing, rows, m.counts,
            m.places);
    });
    report("route", "", rows, us, 0, n * (257 * 2 + 16) * 4);
    for (int t = first_tile; t < end_tile; t++) {
        const expert_tile &tile = EXPERT_TILES[t];
        char name[16];
        snprintf(name, sizeof name, "128x%d", tile.n);
        cuda_groups g = run_routing(m, rows, tile.n);
        us = microseconds(6, [&](int) { run_routing(m, rows, tile.n); });
        report("counts, route, group", name, rows, us, 0, each * 16);
        unsigned all = (unsigned)(pairs / tile.n + used);
        double touched = used == EXPERTS ? 1 : (double)used / EXPERTS;
        us = microseconds(4, [&](int) { run_up(tile, all, x, m, g, hidden, rows); });
        report("experts up", name, rows, us, 4.0 * (each * INNER + n * SHARED) * H,
               touched * 2 * mat_bytes(m.gate) + n * H * 2 + each * INNER * 2);
        us = microseconds(4, [&](int) { run_down(tile, all, hidden, m, g, out, own, rows); });
        report("experts down", name, rows, us, 2.0 * (each * INNER + n * SHARED) * H,
               touched * mat_bytes(m.down) + each * INNER * 2 + each * H * 2);
    }
    float *weight = floats(H, 0.5f, 1.5f), *sums = take<float>((size_t)rows * H / 64);
    bf16 *high = take<bf16>((size_t)rows * H), *low = take<bf16>((size_t)rows * H);
    us = microseconds(6, [&](int) {
        RUN(prompt_combine, rows, 1, 256, 0, out, m.places, m.routing, m.scores, own, residual,
            weight, x, high, low, sums);
    });
    report("combine and norm", "", rows, us, 0, each * H * 2 + n * H * 16);
    release();
}
static void time_experts() {
    for (int rows : LENGTHS) {
        if (!only || rows == only)
            time_moe(rows,
                     rows < 1024   ? 0
                     : rows < 4096 ? 2
                                   : 3,
                     rows < 2048   ? 3
                     : rows < 4096 ? 4
                                   : 5);
    }
}

static void time_delta() {
    for (int rows : LENGTHS) {
        if (only && rows != only) continue;
        delta_layer d = make_delta(rows, 0);
        double n = rows, pieces = (double)d.pieces * V_HEADS, tile = 64 * DIM;
        double us = microseconds(8, [&](int) { run_convolve(d); });
        report("convolution", "", rows, us, 0, n * CONV_DIM * 4);
        us = microseconds(8, [&](int) { run_pieces(d); });
        report("delta, pieces", "", rows, us, pieces * 64 * 64 * DIM * 2 * 6,
               n * CONV_DIM * 2 + pieces * (tile * 6 + 64 * 64 * 2));
        us = microseconds(8, [&](int) { run_states(d); });
        report("delta, states", "", rows, us, pieces * 2 * (3 * tile * DIM + tile * 64),
               pieces * (tile * 6 + 64 * 64 * 2) + n * (2 * K_DIM * 2 + V_DIM * 2));
        us = microseconds(8, [&](int) { run_gated_norm(d); });
        report("gated norm", "", rows, us, 0, n * V_DIM * 6);
        release();
    }
}

static void time_flash(int rows, int pos) {
    attention_layer a = make_attention(rows, pos);
    double n = rows, seen = n * pos + n * (n + 1) / 2;
    char depth[24];
    snprintf(depth, sizeof depth, "@%d", pos);
    double us = microseconds(4, [&](int) { run_rows(a); });
    if (!pos) report("attention rows", "", rows, us, 0, n * (a.width * 2 + Q_DIM * 2));
    bool split = prefill_split(pos, rows, KV_HEADS, 4096, 132) > 0;
    us = microseconds(pos > 8192 ? 2 : 4, [&](int) { run_flash(a, rows, split); });
    report("attention", depth, rows, us, 4.0 * seen * Q_DIM,
           (pos + n) * KV_DIM * 4 + n * Q_DIM * 6);
    release();
}
static void time_attention() {
    for (int rows : LENGTHS) {
        if (!only || rows == only) time_flash(rows, 0);
    }
    if (only) return;
    const int depths[] = {4096, 12288, 28672, 61440};
    for (int pos : depths) time_flash(4096, pos);
    time_flash(64, 32768);
}

static void time_small() {
    const int lengths[] = {2, 8, 16, 32, 64, 128, 256};
    for (int rows : lengths) {
        for (int t = 0; t < 5; t++) {
            if (DENSE_TILES[t].n > std::max(16, 2 * rows)) continue;
            time_product("qkvz", CONV_DIM + V_DIM, H, rows, DENSE_TILES[t]);
            time_product("out", H, V_DIM, rows, DENSE_TILES[t]);
        }
        time_moe(rows, 0, rows < 64 ? 1 : 2);
    }
}
