"""lily eval against an independent computation from the logits it writes."""

import json
import os
import signal

import numpy as np
import pytest

from conftest import begun, until

TEXT = ("The lily is a plant that grows from a bulb. Its flowers open in early summer.\n"
        "In the old garden nobody counted them; they came back every year.\n") * 4


def document(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def score(lily, standin):
    return lambda *args, **more: document(lily("eval", "-m", standin, "--json", *args, **more))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def tokens(lily, standin, path):
    return np.array(document(lily("tokenize", "-m", standin, "--json", "-f", path))["ids"])


def expected(logits, ids, window):
    """Mean NLL and top-1 accuracy, in double, of the positions that have a successor."""
    nll, right, n = 0.0, 0, 0
    for base in range(0, len(ids), window):
        part = slice(base, min(base + window, len(ids)))
        rows, targets = logits[part][:-1].astype(np.float64), ids[part][1:]
        top = rows.max(axis=1, keepdims=True)
        norm = np.log(np.exp(rows - top).sum(axis=1)) + top[:, 0]
        nll += (norm - rows[np.arange(len(targets)), targets]).sum()
        right += (rows.argmax(axis=1) == targets).sum()
        n += len(targets)
    return nll / n, right / n, n


@pytest.mark.parametrize("window", [2048, 50, 2])
def test_against_numpy(lily, standin, score, text_file, tmp_path, window):
    ids = tokens(lily, standin, text_file)
    assert len(ids) > 100
    doc = score("--text", text_file, "--window", window, "--logits-out", tmp_path / "l.npy")
    logits = np.load(tmp_path / "l.npy")
    assert logits.dtype == np.float32 and logits.shape[0] == len(ids) == doc["tokens"]
    nll, top1, n = expected(logits, ids, window)
    assert doc["positions"] == n
    assert doc["nll"] == pytest.approx(nll, abs=1e-6)
    assert doc["perplexity"] == pytest.approx(np.exp(nll), rel=1e-6)
    assert doc["top1"] == pytest.approx(top1, abs=1e-9)
    assert sorted(os.listdir(tmp_path)) == ["l.npy", "text.txt"]


def test_ids_in_every_form(lily, standin, score, text_file, tmp_path):
    ids = tokens(lily, standin, text_file).tolist()
    from_text = score("--text", text_file)
    forms = {"a.json": json.dumps(ids), "b.json": json.dumps(ids, indent=1),
             "c.txt": " ".join(map(str, ids)), "d.txt": "\n".join(map(str, ids)) + "\n"}
    for name, content in forms.items():
        (tmp_path / name).write_text(content)
        doc = score("--ids", tmp_path / name)
        for key in ("perplexity", "top1", "tokens", "logits_digest"):
            assert doc[key] == from_text[key]
    assert score("--text", "-", input=TEXT)["logits_digest"] == from_text["logits_digest"]


def test_windows_are_independent(lily, standin, score, text_file, tmp_path):
    """A window's logits are those of its tokens alone."""
    ids = tokens(lily, standin, text_file)
    score("--text", text_file, "--window", 40, "--logits-out", tmp_path / "all.npy")
    (tmp_path / "ids.txt").write_text(" ".join(map(str, ids[40:80])))
    score("--ids", tmp_path / "ids.txt", "--logits-out", tmp_path / "one.npy")
    together, alone = np.load(tmp_path / "all.npy")[40:80], np.load(tmp_path / "one.npy")
    np.testing.assert_array_equal(together, alone)


def test_backends_agree(score, text_file):
    usual, plain = score("--text", text_file), score("--text", text_file, "--backend", "ref")
    assert usual["perplexity"] == pytest.approx(plain["perplexity"], rel=0.02)


def test_table(lily, standin, score, text_file):
    doc = score("--text", text_file)
    done = lily("eval", "-m", standin, "--text", text_file)
    assert done.returncode == 0 and done.stderr == ""
    assert f"{doc['perplexity']:.4f}" in done.stdout and doc["logits_digest"] in done.stdout


@pytest.mark.parametrize("content, part", [
    ("", "nothing"), ("5", "at least 2"), ("[1, 2", "byte"), ("1 2 x", "byte 4"),
    ("1, 2", "byte"), ("[1 -2]", "byte"), ("1 99999999", "99999999"), ("1 2]", "byte"),
    ("[1.5, 2]", "byte")])
def test_bad_ids(lily, standin, tmp_path, content, part):
    (tmp_path / "ids").write_text(content)
    done = lily("eval", "-m", standin, "--ids", tmp_path / "ids", "--logits-out",
                tmp_path / "l.npy")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"lily: {tmp_path / 'ids'}: ") and part in done.stderr
    assert os.listdir(tmp_path) == ["ids"]


def test_unreadable(lily, standin, text_file, tmp_path):
    for words in (["--text", tmp_path / "none"], ["--ids", tmp_path],
                  ["--text", text_file, "--logits-out", tmp_path / "none" / "x.npy"]):
        done = lily("eval", "-m", standin, *words)
        assert done.returncode == 1 and str(words[-1]).split("/x.npy")[0] in done.stderr
        assert done.stderr.startswith("lily: ") and done.stderr.count("\n") == 1


def test_interrupt_leaves_nothing(lily, standin, tmp_path):
    (tmp_path / "ids").write_text(" ".join(str(i % 200) for i in range(200000)))
    process = lily.start("eval", "-m", standin, "--ids", tmp_path / "ids", "--window", "256",
                         "--logits-out", tmp_path / "l.npy")
    until(lambda: begun(tmp_path, process.pid, ["ids"]))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT and err == b"lily: interrupted\n"
    assert os.listdir(tmp_path) == ["ids"]
