/* Qwen3.6-35B-A3B. Read by C11, CUDA and MSL alike: only macros, no types. Numbers from the
 * model's config.json; Qwen3.5-35B-A3B has the same shape. */
#define SHAPE_NAME         "qwen3.6-35b-a3b"
#define SHAPE_SUFFIX       qwen36_35b_a3b
#define SHAPE_HIDDEN       2048
#define SHAPE_LAYERS       40
#define SHAPE_VOCAB        248320 /* rows of embedding and head; the last ones are padding */
#define SHAPE_Q_HEADS      16
#define SHAPE_KV_HEADS     2
#define SHAPE_HEAD_DIM     256
#define SHAPE_ROTARY_DIM   64
#define SHAPE_ROPE_THETA   10000000.0
#define SHAPE_GDN_K_HEADS  16
#define SHAPE_GDN_V_HEADS  32
#define SHAPE_EXPERTS      256
#define SHAPE_EXPERT_WIDTH 512
#define SHAPE_SHARED_WIDTH 512
#define SHAPE_MAX_CONTEXT  262144
#include "shape_common.h"
