"""Rewrites the reference folder's golden.npz as a golden in the layout of tests/golden/README.md.

    from_npz.py IN.npz OUT.safetensors

Standard library only: an .npz is a zip of .npy files. The source keeps states of every tenth and
logits of every third position; its last state is the final norm's output.
"""

import ast
import json
import struct
import sys
import zipfile


def read(archive, name):
    raw = archive.read(name + ".npy")
    n = int.from_bytes(raw[8:10], "little")
    about = ast.literal_eval(raw[10 : 10 + n].decode("latin-1"))
    if about["descr"] not in ("<f4", "<i4") or about["fortran_order"]:
        sys.exit(f"{name}: found {about}, expected little-endian 32-bit rows")
    return ("F32" if about["descr"] == "<f4" else "U32"), list(about["shape"]), raw[10 + n :]


def positions(rows, stride):
    return "U32", [rows], struct.pack(f"<{rows}I", *range(0, rows * stride, stride))


def main(source, target):
    archive = zipfile.ZipFile(source)
    names = {name.removesuffix(".npy") for name in archive.namelist()}
    last = max(int(n[1:]) for n in names if n[0] == "h" and n[1:].isdigit())
    rename = {"ids": "ids", "logits": "logits", "h0": "embed", f"h{last}": "final_norm"}
    rename |= {f"h{i + 1}": f"layer_out.{i}" for i in range(last - 1)}
    rename |= {f"mixer{i}": f"mixer_out.{i}" for i in (0, 3)} | {f"moe{i}": f"moe.{i}" for i in (0, 3)}
    tensors = {new: read(archive, old) for old, new in rename.items()}
    tensors["positions"] = positions(tensors["embed"][1][0], 10)
    tensors["logits_positions"] = positions(tensors["logits"][1][0], 3)

    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(target, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors.values():
            f.write(data)


if __name__ == "__main__":
    main(*sys.argv[1:])
