/* The smallest shape that the prompt kernels of sm_90a take: widths are multiples of 512. */
#define SHAPE_NAME         "prefill"
#define SHAPE_SUFFIX       prefill
#define SHAPE_HIDDEN       512
#define SHAPE_LAYERS       8
#define SHAPE_VOCAB        4096
#define SHAPE_Q_HEADS      8
#define SHAPE_KV_HEADS     1
#define SHAPE_HEAD_DIM     256
#define SHAPE_ROTARY_DIM   64
#define SHAPE_ROPE_THETA   10000000.0
#define SHAPE_GDN_K_HEADS  2
#define SHAPE_GDN_V_HEADS  4
#define SHAPE_EXPERTS      16
#define SHAPE_EXPERT_WIDTH 512
#define SHAPE_SHARED_WIDTH 512
#define SHAPE_MAX_CONTEXT  262144
#include "model/shapes/shape_common.h"

#define PREFILL_SEGMENT 256 /* several of them in what is small enough for a processor */
