/* The stages of one step, in order, with the same names in ref, cpu, cuda and metal. A backend that
 * traces (backend_options.trace) reports the float32 output of each; tests compare them row by row.
 */
#ifndef LILY_MODEL_STAGES_H
#define LILY_MODEL_STAGES_H

/* enum name, printed name, width of a row */
#define STAGE_MAP(XX)                                                                              \
    XX(STAGE_EMBED, "embed", "[H] embedding row")                                                  \
    XX(STAGE_INPUT_NORM, "input_norm", "[H] normalised input of the mixer")                        \
    XX(STAGE_ATTN_Q, "attn_q", "[q_dim] queries after norm and RoPE")                              \
    XX(STAGE_ATTN_K, "attn_k", "[kv_dim] keys after norm and RoPE")                                \
    XX(STAGE_ATTN_V, "attn_v", "[kv_dim] values")                                                  \
    XX(STAGE_ATTN_MIX, "attn_mix", "[q_dim] attention output times sigmoid(gate)")                 \
    XX(STAGE_GDN_CONV, "gdn_conv", "[conv_dim] after convolution and SiLU")                        \
    XX(STAGE_GDN_GATES, "gdn_gates", "[2 * gdn_v_heads] beta, then exp(g)")                        \
    XX(STAGE_GDN_DELTA, "gdn_delta", "[gdn_v_dim] output of the delta rule")                       \
    XX(STAGE_GDN_NORM, "gdn_norm", "[gdn_v_dim] after the gated norm")                             \
    XX(STAGE_MIXER_OUT, "mixer_out", "[H] output projection of the mixer")                         \
    XX(STAGE_POST_NORM, "post_norm", "[H] normalised input of the experts")                        \
    XX(STAGE_ROUTER, "router", "[2 * top_k] chosen expert ids, then their weights")                \
    XX(STAGE_EXPERTS, "experts", "[H] weighted sum of the routed experts")                         \
    XX(STAGE_SHARED, "shared", "[H] gated shared expert")                                          \
    XX(STAGE_LAYER_OUT, "layer_out", "[H] residual stream after the layer")                        \
    XX(STAGE_FINAL_NORM, "final_norm", "[H] normalised input of the head")                         \
    XX(STAGE_LOGITS, "logits", "[V]")

enum stage {
#define STAGE_ENUM(name, text, what) name,
    STAGE_MAP(STAGE_ENUM)
#undef STAGE_ENUM
        STAGE_COUNT
};

const char *stage_name(enum stage stage);

#endif
