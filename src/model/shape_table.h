/* Makes one `const struct shape` from the shape header included just before. No include guard:
 * each table file includes it once. */
#define SHAPE_JOIN_(a, b) a##b
#define SHAPE_JOIN(a, b)  SHAPE_JOIN_(a, b)

const struct shape SHAPE_JOIN(shape_, SHAPE_SUFFIX) = {
    .name = SHAPE_NAME,
    .hidden = SHAPE_HIDDEN,
    .layers = SHAPE_LAYERS,
    .vocab = SHAPE_VOCAB,
    .q_heads = SHAPE_Q_HEADS,
    .kv_heads = SHAPE_KV_HEADS,
    .head_dim = SHAPE_HEAD_DIM,
    .rotary_dim = SHAPE_ROTARY_DIM,
    .rope_theta = SHAPE_ROPE_THETA,
    .gdn_k_heads = SHAPE_GDN_K_HEADS,
    .gdn_v_heads = SHAPE_GDN_V_HEADS,
    .gdn_head_dim = SHAPE_GDN_HEAD_DIM,
    .conv_taps = SHAPE_CONV_TAPS,
    .experts = SHAPE_EXPERTS,
    .top_k = SHAPE_TOP_K,
    .expert_width = SHAPE_EXPERT_WIDTH,
    .shared_width = SHAPE_SHARED_WIDTH,
    .attention_every = SHAPE_ATTENTION_EVERY,
    .group = SHAPE_GROUP,
    .max_context = SHAPE_MAX_CONTEXT,
    .norm_eps = SHAPE_NORM_EPS,
    .q_dim = SHAPE_Q_DIM,
    .kv_dim = SHAPE_KV_DIM,
    .gdn_k_dim = SHAPE_GDN_K_DIM,
    .gdn_v_dim = SHAPE_GDN_V_DIM,
    .conv_dim = SHAPE_CONV_DIM,
};
