#!/usr/bin/env python3
"""Times llama.cpp on a GGUF file through llama-cpp-python's low-level interface.

    time_llama.py FILE.gguf [--threads 2] [--prompt 512] [--decode 32] [--repeat 3]

Prints one JSON document: tokens per second of every repeat of prompt processing and of decoding
after it, the same work as `lily bench`: no sampling beyond an argmax, logits of the last token."""
import argparse
import ctypes
import json
import time

import llama_cpp as ll
import numpy as np


def batch_of(ids):
    array = (ll.llama_token * len(ids))(*ids)
    return ll.llama_batch_get_one(array, len(ids)), array  # the array must outlive the batch


def decode(context, ids):
    batch, keep = batch_of(ids)
    if ll.llama_decode(context, batch) != 0:
        raise SystemExit("llama_decode failed")
    ll.llama_synchronize(context)
    return keep


def argmax(context, vocab):
    logits = ll.llama_get_logits_ith(context, -1)
    return int(np.ctypeslib.as_array(logits, shape=(vocab,)).argmax())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    quiet = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(quiet, ctypes.c_void_p(0))
    ll.llama_backend_init()
    params = ll.llama_model_default_params()
    model = ll.llama_model_load_from_file(args.file.encode(), params)
    if not model:
        raise SystemExit(f"{args.file}: llama.cpp cannot load it")
    cp = ll.llama_context_default_params()
    cp.n_ctx = args.prompt + args.decode + 64
    cp.n_batch = cp.n_ubatch = 512
    cp.n_threads = cp.n_threads_batch = args.threads
    context = ll.llama_init_from_model(model, cp)
    vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    rng = np.random.default_rng(2)
    prompt = [int(i) for i in rng.integers(0, 200000, args.prompt)]
    decode(context, prompt[:8])  # warm-up: pages and buffers
    result = {"prefill": [], "decode": []}
    for _ in range(args.repeat):
        ll.llama_memory_clear(ll.llama_get_memory(context), True)
        start = time.perf_counter()
        for at in range(0, len(prompt), 512):
            decode(context, prompt[at : at + 512])
        middle = time.perf_counter()
        for _ in range(args.decode):
            decode(context, [argmax(context, vocab)])
        end = time.perf_counter()
        if args.prompt:
            result["prefill"].append(round(args.prompt / (middle - start), 2))
        if args.decode:
            result["decode"].append(round(args.decode / (end - middle), 2))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
