/* What every shape of this family shares, and what follows from a shape's own numbers.
 * Included at the end of a shape header. C11, CUDA and MSL. */
#define SHAPE_GDN_HEAD_DIM    128 /* of keys and of values: the recurrent state is 128 x 128 */
#define SHAPE_CONV_TAPS       4   /* causal depthwise convolution over time */
#define SHAPE_TOP_K           8   /* routed experts per token */
#define SHAPE_ATTENTION_EVERY 4   /* layer l is full attention when (l + 1) % 4 == 0 */
#define SHAPE_GROUP           64  /* inputs per quantisation group */
#define SHAPE_NORM_EPS        1e-6f

#define SHAPE_Q_DIM     (SHAPE_Q_HEADS * SHAPE_HEAD_DIM)
#define SHAPE_KV_DIM    (SHAPE_KV_HEADS * SHAPE_HEAD_DIM)
#define SHAPE_GDN_K_DIM (SHAPE_GDN_K_HEADS * SHAPE_GDN_HEAD_DIM)
#define SHAPE_GDN_V_DIM (SHAPE_GDN_V_HEADS * SHAPE_GDN_HEAD_DIM)
#define SHAPE_CONV_DIM  (2 * SHAPE_GDN_K_DIM + SHAPE_GDN_V_DIM)

#ifdef __METAL_VERSION__
#define SHAPE_ASSERT(cond, text) static_assert(cond, text)
#elif defined(__cplusplus)
#define SHAPE_ASSERT(cond, text) static_assert(cond, text)
#else
#define SHAPE_ASSERT(cond, text) _Static_assert(cond, text)
#endif
SHAPE_ASSERT(SHAPE_Q_HEADS == 8 * SHAPE_KV_HEADS, "eight query heads share a key/value head");
SHAPE_ASSERT(SHAPE_GDN_V_HEADS == 2 * SHAPE_GDN_K_HEADS, "two value heads share a key head");
SHAPE_ASSERT(SHAPE_LAYERS % SHAPE_ATTENTION_EVERY == 0, "whole blocks of four layers");
SHAPE_ASSERT(SHAPE_HIDDEN % SHAPE_GROUP == 0, "rows are whole quantisation groups");
SHAPE_ASSERT(SHAPE_EXPERT_WIDTH % SHAPE_GROUP == 0, "expert rows are whole groups");
SHAPE_ASSERT(SHAPE_SHARED_WIDTH % SHAPE_GROUP == 0, "shared expert rows are whole groups");
SHAPE_ASSERT(SHAPE_ROTARY_DIM <= SHAPE_HEAD_DIM, "rotary dimensions are a part of a head");
SHAPE_ASSERT(SHAPE_EXPERTS >= SHAPE_TOP_K, "enough experts to choose from");
