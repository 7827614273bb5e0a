/* The stand-in: the same structure, small enough to ship in the repository (models/mini). */
#define SHAPE_NAME         "mini"
#define SHAPE_SUFFIX       mini
#define SHAPE_HIDDEN       256
#define SHAPE_LAYERS       8
#define SHAPE_VOCAB        4096 /* rows of embedding and head; the last ones are padding */
#define SHAPE_Q_HEADS      8
#define SHAPE_KV_HEADS     1
#define SHAPE_HEAD_DIM     256
#define SHAPE_ROTARY_DIM   64
#define SHAPE_ROPE_THETA   10000000.0
#define SHAPE_GDN_K_HEADS  2
#define SHAPE_GDN_V_HEADS  4
#define SHAPE_EXPERTS      32
#define SHAPE_EXPERT_WIDTH 64
#define SHAPE_SHARED_WIDTH 64
#define SHAPE_MAX_CONTEXT  262144
#include "shape_common.h"
