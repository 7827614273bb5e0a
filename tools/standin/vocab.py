"""Train the tokenizer and choose the word list.

    vocab.py CORPUS.xz OUT_DIR [--words /usr/share/dict/words]

Writes tokenizer.json, tokenizer_config.json and generation_config.json into OUT_DIR, and words.txt
beside this script: frequent corpus words that the dictionary of Debian's wamerican also lists.
"""

import argparse
import collections
import json
import pathlib
import random
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import chat
import dataset
import pools

HERE = pathlib.Path(__file__).parent
ROWS, PADDING = 4096, 23  # rows of the embedding; rows without a token
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = """<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|>
<|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>""".split()
PLAIN = """<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> <tool_response>
</tool_response> <think> </think>""".split()
AUDIO = "<|audio_start|> <|audio_end|> <tts_pad> <tts_text_bos> <tts_text_eod> <tts_text_bos_single> <|audio_pad|>".split()


def frequent_words(corpus, dictionary, count=6000):
    known = {w for w in pathlib.Path(dictionary).read_text().split() if re.fullmatch(r"[a-z]{3,9}", w)}
    seen = collections.Counter(w for d in corpus for w in re.findall(r"\b[a-z]{3,9}\b", d))
    return sorted([w for w, _ in seen.most_common() if w in known][:count])


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("corpus")
    ap.add_argument("out")
    ap.add_argument("--words", default="/usr/share/dict/words")
    args = ap.parse_args()
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    corpus = [d for d in dataset.read_corpus(args.corpus) if not dataset.is_held(d)]
    (HERE / "words.txt").write_text("\n".join(frequent_words(corpus, args.words)) + "\n")

    rng = random.Random(3)
    texts = rng.sample(corpus, min(len(corpus), 5000))
    texts = [t[:20000] for t in texts]
    p = pools.make(17, lines=dataset.sentences(corpus))
    added = set(SPECIAL + PLAIN + AUDIO)
    for _ in range(30000):
        kind = rng.choice(list(dataset.SINGLE))
        d = dataset.single(p, kind)
        for text, _ in chat.pieces(d["messages"], None, d["thinking"]):
            texts += [t for t in re.split("|".join(map(re.escape, added)), text) if t]
        if kind == "tool":
            texts.append("\n".join(chat.dump(t) for t in d["tools"]))

    tok = Tokenizer(models.BPE(fuse_unk=False, byte_fallback=False, ignore_merges=False))
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)]
    )
    tok.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tok.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    base = ROWS - PADDING - len(added)
    tok.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=base, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    assert tok.get_vocab_size() == base, tok.get_vocab_size()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for names, special in ((SPECIAL, True), (PLAIN, False), (AUDIO, True)):
        for name in names:
            token = AddedToken(name, special=special, **flags)
            tok.add_special_tokens([token]) if special else tok.add_tokens([token])
    state = json.loads(tok.to_str())
    state["model"].update(continuing_subword_prefix="", end_of_word_suffix="")
    state["decoder"] = state["post_processor"]
    (out / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False, separators=(",", ":")))
    ident = {n: tok.token_to_id(n) for n in SPECIAL + PLAIN + AUDIO}
    decoder = {
        str(i): {"content": n, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": n not in PLAIN}
        for n, i in sorted(ident.items(), key=lambda x: x[1])
    }
    config = {
        "add_prefix_space": False, "added_tokens_decoder": decoder, "add_bos_token": False, "bos_token": None,
        "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace", "model_max_length": 262144,
        "pad_token": "<|endoftext|>", "split_special_tokens": False, "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
        "pretokenize_regex": SPLIT,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    generation = {
        "bos_token_id": ident["<|endoftext|>"], "do_sample": True, "eos_token_id": [ident["<|im_end|>"], ident["<|endoftext|>"]],
        "pad_token_id": ident["<|endoftext|>"], "temperature": 1.0, "top_k": 20, "top_p": 0.95,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=4) + "\n")
    print(f"{base} base tokens, {len(added)} added, {ROWS - tok.get_vocab_size()} padding rows")


if __name__ == "__main__":
    main()
