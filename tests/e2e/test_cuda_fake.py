"""The whole program on a CUDA driver without a card (fake_libcuda.c): what is wrong is said in words,
by doctor as well, and the CPU takes over where the choice was free."""

import json
import os
import sys

import pytest

from conftest import Terminal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CUDA is part of Linux builds")
RUN = ("run", "--raw", "--max-tokens", "2", "Hi")


@pytest.fixture
def card(request, lily):
    """Runs the program with a card of which FAKE_CUDA says what is wrong."""
    folder = lily.path.parent / "tests" / "fake"
    reason = cuda_of(json.loads(lily("doctor", "--json", "--no-selftest").stdout))["reason"]
    if "without CUDA kernels" in reason:
        pytest.skip("this program has no CUDA kernels")

    def environment(wrong=""):
        return {**os.environ, "LD_LIBRARY_PATH": str(folder), "FAKE_CUDA": wrong}

    def run(*words, wrong=""):
        return lily(*words, env=environment(wrong))

    run.environment = environment
    return run


def cuda_of(doctor):
    return next(b for b in doctor["backends"] if b["name"] == "cuda")


@pytest.mark.parametrize("wrong, text", [
    ("version=12080", "found a driver for CUDA 12.8, expected 13.0 or newer; update the NVIDIA"),
    ("init=100", "found no GPU, expected one that the driver shows"),
    ("devices=0", "found no GPU, expected one that the driver shows"),
    ("init=803", "restart the machine after an update of the NVIDIA driver"),
    ("capability=75", "of compute capability 7.5, expected 8.0 or newer"),
])
def test_a_card_that_does_not_serve(card, wrong, text):
    """doctor says why, a program that asked for it ends, and any other goes on with the CPU."""
    doctor = card("doctor", "--json", "--no-selftest", wrong=wrong)
    assert doctor.returncode == 0
    cuda = cuda_of(json.loads(doctor.stdout))
    assert not cuda["usable"] and text in cuda["reason"]
    asked = card(*RUN, "--backend", "cuda", wrong=wrong)
    assert asked.returncode == 1 and text in asked.stderr and "see lily doctor" in asked.stderr
    free = card(*RUN, "--verbose", wrong=wrong)
    assert free.returncode == 0 and "backend: cpu on" in free.stderr and text in free.stderr


@pytest.mark.parametrize("wrong, text", [
    ("memory=1000000", "this GPU is too small for the model: use the CPU backend"),
    ("memory=480000000 context=330000000", "session(s) of"),
    ("module=209", "found no kernels for this GPU in the program, expected some; build with"),
    ("module=222", "the driver is too old to compile; update the NVIDIA driver"),
])
def test_a_card_that_fails_to_open(card, wrong, text):
    """Only opening shows these; a user who did not ask for the card is told without --verbose."""
    assert cuda_of(json.loads(card("doctor", "--json", "--no-selftest", wrong=wrong).stdout))["usable"]
    asked = card(*RUN, "--backend", "cuda", wrong=wrong)
    assert asked.returncode == 1 and text in asked.stderr and asked.stdout == ""
    free = card(*RUN, wrong=wrong)
    assert free.returncode == 0 and "cuda failed to open: " in free.stderr
    assert text in free.stderr and "going on with cpu" in free.stderr


def test_doctor_finds_a_card_that_computes_nothing(card):
    """Its kernels leave everything as it was: no stage is right, and what rests on another says so."""
    done = card("doctor", "--backend", "cuda", "--model-shape", "mini", "--json")
    test, = json.loads(done.stdout)["selftest"]
    assert done.returncode == 1 and not test["passed"] and "error" not in test
    result = {item["name"]: item["result"] for item in test["items"]}
    assert result["decode embed"] == result["prompt embed"] == "failed"
    assert result["decode attn_mix"] == "untested" and result["memory"] == "note"
    assert result["prompts portable"] == result["sampling"] == "failed"


def test_doctor_tells_why_there_is_no_test(card):
    done = card("doctor", "--json", wrong="devices=0")
    doc = json.loads(done.stdout)
    assert done.returncode == 0 and "found no GPU" in cuda_of(doc)["reason"]
    assert all(test["backend"] != "cuda" for test in doc["selftest"])


def test_bench(card):
    """tok/s, GB/s and the fraction of what the memory gives."""
    done = card("bench", "--backend", "cuda", "-p", "8", "-n", "2", "-d", "0", "-r", "1", "--json")
    assert done.returncode == 0, done.stderr
    prefill, decode = json.loads(done.stdout)
    assert prefill["tok_s"] > 0 and prefill["gb_s"] is None
    assert decode["bound"] == "stated by the driver" and decode["bound_gb_s"] == pytest.approx(4916.7, 1e-4)
    assert decode["fraction_of_bound"] == pytest.approx(decode["gb_s"] / decode["bound_gb_s"])
    assert "portable" in decode["kernels"]


def test_progress_bar(card, lily):
    """Of the upload, on a terminal and nowhere else."""
    assert "upload" not in card(*RUN, "--backend", "cuda").stderr
    slow = card.environment("wait_ms=100")
    words = [f"{name}={slow[name]}" for name in ("LD_LIBRARY_PATH", "FAKE_CUDA")]
    terminal = Terminal(["/usr/bin/env", *words, str(lily.path), *RUN, "--backend", "cuda"])
    terminal.expect("upload")
    assert terminal.wait() == 0
