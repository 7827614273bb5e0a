/* Figures that others published for the model that this engine runs, to stand beside measured ones.
 */
#ifndef LILY_CLI_PUBLISHED_H
#define LILY_CLI_PUBLISHED_H

#include <stdint.h>

/* Lily's own reports, 2026: tok/s over a prompt of n tokens, and decoding 64 tokens at that depth.
 */
struct published {
    int32_t n;
    double prefill_lily, prefill_mlx, decode_lily, decode_mlx;
};
#define PUBLISHED_SOURCE  "reports of Lily's authors"
#define PUBLISHED_MACHINE "Apple M5 Max, 40-core GPU, 128 GB"
#define PUBLISHED_MLX     "MLX 0.32.2"
#define PUBLISHED_MODEL   "qwen3.6-35b-a3b"
#define PUBLISHED_LAYERS  40

enum { PUBLISHED_LENGTHS = 10 };
static const struct published published[PUBLISHED_LENGTHS] = {
    {256, 2867, 2536, 194.7, 148.5},   {512, 3860, 3310, 193.8, 149.5},
    {1024, 4735, 4472, 193.3, 148.1},  {2048, 5274, 5122, 190.4, 147.6},
    {4096, 5724, 5166, 182.8, 145.6},  {8192, 5458, 5032, 180.5, 136.8},
    {16384, 4969, 4723, 167.0, 129.6}, {32768, 3927, 3964, 151.1, 118.2},
    {65536, 2753, 3051, 125.4, 98.5},  {131072, 1793, 2238, 92.7, 75.0},
};

#endif
