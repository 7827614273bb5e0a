#include "ckpt/synth_texts.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The control tokens in the order of their ids (tokenizer_config.json of the published model). */
static const struct {
    const char *text;
    bool special;
} added[] = {
    {"<|endoftext|>", true},      {"<|im_start|>", true},
    {"<|im_end|>", true},         {"<|object_ref_start|>", true},
    {"<|object_ref_end|>", true}, {"<|box_start|>", true},
    {"<|box_end|>", true},        {"<|quad_start|>", true},
    {"<|quad_end|>", true},       {"<|vision_start|>", true},
    {"<|vision_end|>", true},     {"<|vision_pad|>", true},
    {"<|image_pad|>", true},      {"<|video_pad|>", true},
    {"<tool_call>", false},       {"</tool_call>", false},
    {"<|fim_prefix|>", false},    {"<|fim_middle|>", false},
    {"<|fim_suffix|>", false},    {"<|fim_pad|>", false},
    {"<|repo_name|>", false},     {"<|file_sep|>", false},
    {"<tool_response>", false},   {"</tool_response>", false},
    {"<think>", false},           {"</think>", false},
    {"<|audio_start|>", true},    {"<|audio_end|>", true},
    {"<tts_pad>", true},          {"<tts_text_bos>", true},
    {"<tts_text_eod>", true},     {"<tts_text_bos_single>", true},
    {"<|audio_pad|>", true},
};
enum { ADDED = sizeof added / sizeof *added, ENDOFTEXT = 0, IM_END = 2 };

/* The id of the first one, as the published model and the trained stand-in have it. */
static int first_added(const struct shape *s) {
    static const struct {
        const struct shape *shape;
        int id;
    } first[] = {{&shape_qwen36_35b_a3b, 248044}, {&shape_mini, 4040}};
    for (size_t i = 0; i < sizeof first / sizeof *first; i++) {
        if (first[i].shape == s) return first[i].id;
    }
    return s->vocab - ADDED; /* a shape added later: at the end */
}

/* UTF-8 spelling of a byte in GPT-2's alphabet: printable Latin-1 characters stand for themselves,
 * the other bytes for U+0100 and up. Ids 0..255 go through the printable ones first. */
static void byte_spelling(int id, char out[3]) {
    unsigned code = 0;
    int seen = 0;
    for (int pass = 0; pass < 2 && code == 0; pass++) {
        unsigned hidden = 0x100;
        for (unsigned b = 0; b < 256; b++) {
            bool printable = (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
            unsigned point = printable ? b : hidden++;
            if (printable == (pass == 0) && seen++ == id) {
                code = point;
                break;
            }
        }
    }
    if (code < 0x80) {
        out[0] = (char)code;
        out[1] = 0;
    } else {
        out[0] = (char)(0xc0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3f));
        out[2] = 0;
    }
}

/* Of an id from 256 on: four letters, in the order of the ids, of which there are fewer than 26^4.
 */
static void word_spelling(int id, char out[5]) {
    out[4] = 0;
    for (int i = 3; i >= 0; i--, id /= 26) out[i] = (char)('a' + id % 26);
}

/* All ids below the control tokens have one, as in the published model: those without could not be
 * sampled, and a device that samples would have to mask them in every step. Without merges no text
 * becomes more than bytes. */
static json_t *vocabulary(const struct shape *s) {
    json_t *vocab = json_object();
    for (int id = 0; id < first_added(s); id++) {
        char key[5];
        if (id < 256) {
            byte_spelling(id, key);
        } else {
            word_spelling(id, key);
        }
        json_object_set_new(vocab, key, json_integer(id));
    }
    return vocab;
}

static json_t *added_tokens(const struct shape *s) {
    json_t *list = json_array();
    for (int i = 0; i < ADDED; i++) {
        json_array_append_new(list, json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id",
                                              first_added(s) + i, "content", added[i].text,
                                              "single_word", 0, "lstrip", 0, "rstrip", 0,
                                              "normalized", 0, "special", added[i].special));
    }
    return list;
}

static json_t *byte_level(void) {
    return json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0,
                     "trim_offsets", 0, "use_regex", 0);
}

static json_t *tokenizer(const struct shape *s) {
    static const char split[] =
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}| "
        "?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
    json_t *model = json_pack("{s:s, s:n, s:n, s:s, s:s, s:b, s:b, s:b, s:o, s:[]}", "type", "BPE",
                              "dropout", "unk_token", "continuing_subword_prefix", "",
                              "end_of_word_suffix", "", "fuse_unk", 0, "byte_fallback", 0,
                              "ignore_merges", 0, "vocab", vocabulary(s), "merges");
    json_t *before = json_pack("{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, o]}", "type", "Sequence",
                               "pretokenizers", "type", "Split", "pattern", "Regex", split,
                               "behavior", "Isolated", "invert", 0, byte_level());
    return json_pack("{s:s, s:n, s:n, s:o, s:{s:s}, s:o, s:o, s:o, s:o}", "version", "1.0",
                     "truncation", "padding", "added_tokens", added_tokens(s), "normalizer", "type",
                     "NFC", "pre_tokenizer", before, "post_processor", byte_level(), "decoder",
                     byte_level(), "model", model);
}

static json_t *tokenizer_config(const struct shape *s) {
    json_t *decoder = json_object();
    for (int i = 0; i < ADDED; i++) {
        char id[16];
        snprintf(id, sizeof id, "%d", first_added(s) + i);
        json_object_set_new(
            decoder, id,
            json_pack("{s:s, s:b}", "content", added[i].text, "special", added[i].special));
    }
    return json_pack("{s:b, s:b, s:o, s:n, s:s, s:s, s:s, s:i}", "add_bos_token", 0,
                     "add_prefix_space", 0, "added_tokens_decoder", decoder, "bos_token",
                     "eos_token", added[IM_END].text, "pad_token", added[ENDOFTEXT].text,
                     "tokenizer_class", "Qwen2Tokenizer", "model_max_length", s->max_context);
}

static json_t *generation_config(const struct shape *s) {
    int first = first_added(s);
    return json_pack("{s:i, s:b, s:[i, i], s:i, s:f, s:i, s:f}", "bos_token_id", first + ENDOFTEXT,
                     "do_sample", 1, "eos_token_id", first + IM_END, first + ENDOFTEXT,
                     "pad_token_id", first + ENDOFTEXT, "temperature", 1.0, "top_k", 20, "top_p",
                     0.95);
}

static json_t *text_config(const struct shape *s, int32_t layers) {
    json_t *types = json_array();
    for (int32_t l = 0; l < layers; l++) {
        json_array_append_new(
            types, json_string(shape_is_attention(s, l) ? "full_attention" : "linear_attention"));
    }
    json_t *rope =
        json_pack("{s:b, s:[i, i, i], s:f, s:f, s:s}", "mrope_interleaved", 1, "mrope_section", 11,
                  11, 10, "partial_rotary_factor", (double)s->rotary_dim / s->head_dim,
                  "rope_theta", s->rope_theta, "rope_type", "default");
    json_t *c = json_pack(
        "{s:b, s:b, s:s, s:i, s:i, s:s, s:i, s:o, s:i, s:i, s:i, s:i, s:i, s:s}", "attention_bias",
        0, "attn_output_gate", 1, "dtype", "bfloat16", "full_attention_interval",
        s->attention_every, "head_dim", s->head_dim, "hidden_act", "silu", "hidden_size", s->hidden,
        "layer_types", types, "linear_conv_kernel_dim", s->conv_taps, "linear_key_head_dim",
        s->gdn_head_dim, "linear_num_key_heads", s->gdn_k_heads, "linear_num_value_heads",
        s->gdn_v_heads, "linear_value_head_dim", s->gdn_head_dim, "mamba_ssm_dtype", "float32");
    json_t *rest =
        json_pack("{s:i, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:o, s:i, s:b, s:i}",
                  "max_position_embeddings", s->max_context, "model_type", "qwen3_5_moe_text",
                  "moe_intermediate_size", s->expert_width, "num_attention_heads", s->q_heads,
                  "num_experts", s->experts, "num_experts_per_tok", s->top_k, "num_hidden_layers",
                  layers, "num_key_value_heads", s->kv_heads, "partial_rotary_factor",
                  (double)s->rotary_dim / s->head_dim, "rms_norm_eps", 1e-6, "rope_parameters",
                  rope, "shared_expert_intermediate_size", s->shared_width, "tie_word_embeddings",
                  0, "vocab_size", s->vocab);
    json_object_update(c, rest);
    json_decref(rest);
    return c;
}

static json_t *config(const struct shape *s, int32_t layers) {
    json_t *q = json_pack("{s:i, s:i, s:s}", "group_size", s->group, "bits", 4, "mode", "affine");
    for (int32_t l = 0; l < layers; l++) {
        static const char *const modules[] = {"mlp.gate", "mlp.shared_expert_gate"};
        for (int i = 0; i < 2; i++) {
            char name[96];
            snprintf(name, sizeof name, "language_model.model.layers.%d.%s", l, modules[i]);
            json_object_set_new(q, name,
                                json_pack("{s:i, s:i}", "group_size", s->group, "bits", 8));
        }
    }
    int first = first_added(s);
    return json_pack("{s:[s], s:[i, i], s:s, s:o, s:o, s:b}", "architectures",
                     "Qwen3_5MoeForConditionalGeneration", "eos_token_id", first + IM_END,
                     first + ENDOFTEXT, "model_type", "qwen3_5_moe", "quantization", q,
                     "text_config", text_config(s, layers), "tie_word_embeddings", 0);
}

int synth_texts_make(const struct shape *s, int32_t layers, struct texts *t, int32_t *vocab_used,
                     lily_err *err) {
    *t = (struct texts){0};
    *vocab_used = first_added(s) + ADDED;
    json_t *roots[TEXT_COUNT] = {
        [TEXT_CONFIG] = config(s, layers),
        [TEXT_TOKENIZER] = tokenizer(s),
        [TEXT_TOKENIZER_CONFIG] = tokenizer_config(s),
        [TEXT_GENERATION_CONFIG] = generation_config(s),
    };
    bool ok = true;
    for (int i = 0; i < TEXT_COUNT; i++) {
        if (i == TEXT_CHAT_TEMPLATE) continue; /* the program renders its own */
        char *text =
            roots[i] ? json_dumps(roots[i], JSON_INDENT(1) | JSON_REAL_PRECISION(15)) : NULL;
        t->file[i].data = text;
        t->file[i].size = text ? strlen(text) : 0;
        ok = ok && text;
        json_decref(roots[i]);
    }
    if (ok) return 0;
    synth_texts_free(t);
    return ERR_NOMEM(err, "synthetic checkpoint");
}

void synth_texts_free(struct texts *t) {
    for (int i = 0; i < TEXT_COUNT; i++) free((char *)(uintptr_t)t->file[i].data);
    *t = (struct texts){0};
}
