#!/usr/bin/env python3
"""Compares two files of `lily eval --logits-out`: mean KL(A || B), largest difference, equal top-1.

    lily eval -m CUT.lily --backend ref --ids IDS --logits-out a.npy
    lily eval -m CUT.lily --backend cpu --ids IDS --logits-out b.npy
    logits_diff.py a.npy b.npy"""
import sys

import numpy as np


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def main():
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    a, b = (np.load(path).astype(np.float64) for path in sys.argv[1:])
    if a.shape != b.shape:
        raise SystemExit(f"{sys.argv[2]}: found shape {b.shape}, expected {a.shape}")
    la, lb = log_softmax(a), log_softmax(b)
    kl = (np.exp(la) * (la - lb)).sum(-1)
    print(f"positions {len(a)}, spread {a.std():.3f}")
    print(f"mean KL {kl.mean():.2e}, largest {kl.max():.2e}")
    print(f"largest difference {np.abs(a - b).max():.2e}")
    print(f"top-1 equal {(a.argmax(-1) == b.argmax(-1)).mean():.4f}")


if __name__ == "__main__":
    main()
