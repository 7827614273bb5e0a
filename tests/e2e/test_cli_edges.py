"""What a command does with odd input: "-", folders, names that are not text, nohup."""

import json
import os
import shutil
import signal
import subprocess
import time

import pytest

from test_cli import FAILED, OK, USAGE, document, refused

SHORT = ["--no-think", "--temperature", 0, "--max-tokens", 8]


def test_a_dash_is_standard_input(lily, standin, tmp_path):
    words = ["run", "-m", standin, *SHORT]
    (tmp_path / "more.txt").write_text("and again")
    for dash, whole in [(["-"], "Say hello."), (["--", "-"], "Say hello."),
                        (["-", "--file", tmp_path / "more.txt"], "Say hello.\n\nand again")]:
        piped = lily(*words, "--json", *dash, input="Say hello.")
        given = lily(*words, "--json", whole)
        assert document(piped)["prompt_tokens"] == document(given)["prompt_tokens"]
        assert document(piped)["text"] == document(given)["text"]
    assert lily("tokenize", "-m", standin, "-", input="Say hello.").stdout == \
        lily("tokenize", "-m", standin, "Say hello.").stdout
    refused(lily(*words, "-"), FAILED, "prompt")


@pytest.mark.parametrize("words", [["run", "--file"], ["run", "hi", "--tools"], ["eval", "--text"],
                                   ["tokenize", "--chat"]])
def test_a_folder_is_no_file(lily, standin, tmp_path, words):
    refused(lily(*words, tmp_path, "-m", standin), FAILED, str(tmp_path), "give a file's path")


def test_an_answer_that_fills_the_context(lily, standin):
    """Nobody asked for that end, and the text alone does not show it."""
    words = ["run", "-m", standin, "--raw", "--seed", 1]
    full = lily(*words, "--ctx", 24, "Once upon a time there was")
    assert full.returncode == OK and full.stdout
    assert "context of 24 tokens" in full.stderr and "--ctx" in full.stderr
    asked = lily(*words, "--max-tokens", 8, "Once upon a time there was")
    assert asked.returncode == OK and asked.stdout and asked.stderr == ""


def catches(pid, number):
    """Whether the process has a handler for the signal."""
    with open(f"/proc/{pid}/status") as status:
        caught = [line.split()[1] for line in status if line.startswith("SigCgt:")]
    return int(caught[0], 16) >> (number - 1) & 1


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc here")
@pytest.mark.parametrize("opened", [False, True])
def test_a_pipe_is_not_waited_for_beyond_a_signal(lily, tmp_path, opened):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    process = lily.start("run", "--file", pipe)
    # Opened for writing as soon as the program reads, and then nothing comes.
    writer = os.open(pipe, os.O_WRONLY) if opened else None
    while not catches(process.pid, signal.SIGINT):
        time.sleep(0.01)
    end = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < end:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
    if opened:
        os.close(writer)
    assert process.poll() == 128 + signal.SIGINT
    assert process.communicate() == (b"", b"lily: interrupted\n")


def test_an_empty_command(lily):
    refused(lily(""), USAGE, 'found ""', "command")


def test_paths_that_are_not_text(lily, standin, tmp_path):
    """The work is done and told; JSON, which must be text, shows what is none as '?'."""
    name = os.fsencode(tmp_path) + b"/m\xff"
    shown = f"{tmp_path}/m?"

    def run(*words):
        done = subprocess.run([lily.path, *words], capture_output=True, stdin=subprocess.DEVNULL,
                              timeout=60)
        assert done.returncode == OK, done.stderr
        return json.loads(done.stdout)

    assert run("pack", standin, name, "--json")["out"] == shown
    doc = run("run", "-m", name, "--json", "--no-think", "--max-tokens", "2", "hi")
    assert doc["engine"]["path"] == shown
    assert run("synth", name + b"s", "--shape", "mini", "--layers", "4", "--json")["out"] == \
        shown + "s"
    (tmp_path / "ids").write_text("1 2 3")
    doc = run("eval", "-m", standin, "--ids", tmp_path / "ids", "--json", "--logits-out",
              name + b".npy")
    assert doc["logits_out"] == shown + ".npy"
    report = tmp_path / "report.json"
    done = subprocess.run([lily.path, "bench", "-m", name, "-p", "16", "-d", "0", "-n", "1", "-r",
                           "1", "--report", report, "--note", b"\xff"], capture_output=True,
                          stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == OK, done.stderr
    assert json.loads(report.read_text())["note"] == "?"


def test_an_ignored_hangup_stays_ignored(lily, standin):
    """nohup: the closing terminal's SIGHUP is not for what is to outlive it."""
    process = lily.start("run", "-m", standin, "--raw", "--max-tokens", 3000, "--json", "Once",
                         preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    for _ in range(20):
        process.send_signal(signal.SIGHUP)
        time.sleep(0.02)
    out, err = process.communicate(timeout=60)
    assert process.returncode == OK, err
    assert json.loads(out)["finish"] != "cancelled"


# ---- chat as a filter --------------------------------------------------------------------------


def test_chat_tells_what_failed(lily, standin, tmp_path):
    words = ["chat", "-m", standin, *SHORT]
    for line, found in [("/save /no/such/folder/x", "/no/such/folder/x"), ("/sav x", "/sav"),
                        ("/think perhaps", '"perhaps"')]:
        done = lily(*words, input=line + "\nSay hello.\n")
        assert done.returncode == FAILED and done.stdout
        assert done.stderr.startswith("lily: ") and found in done.stderr
    assert lily(*words, input=f"Hi\n/save {tmp_path}/talk.json\n").returncode == OK


def test_chat_without_the_result_of_a_call(lily, trained, terminal, tmp_path):
    """Declining to give it is told, on a line of its own, and the conversation goes on."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "function": {
        "name": "get_weather", "description": "Weather of a city", "parameters": city}}]))
    t = terminal(lily, "chat", "-m", trained, *SHORT[:3], "--no-history", "--tools",
                 tmp_path / "tools.json")
    for key in "\x03\x04":
        t.expect("> ")
        t.type("What is the weather in Paris?\r")
        t.expect("result of get_weather> ")
        t.type(key)
        t.expect("\n(no result given)")
    t.expect("> ")
    t.type("\x04")
    assert t.wait() == OK


def test_chat_of_a_folder(lily, standin, tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    process = lily.start("chat", "-m", standin, stdin=folder)
    os.close(folder)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (FAILED, b"")
    assert err == b"lily: standard input: Is a directory\n"


def test_chat_keeps_a_null(lily, standin, tmp_path):
    """A line is as long as it was typed; U+0000 is a character like any other."""
    path = tmp_path / "talk.json"
    assert lily("chat", "-m", standin, *SHORT, input=f"a\0b\n/save {path}\n").returncode == OK
    assert json.loads(path.read_text())[0]["content"] == "a\0b"


# ---- doctor ------------------------------------------------------------------------------------


def test_doctor_says_that_a_checkpoint_was_not_looked_at(lily, tmp_path):
    done = lily("doctor", "-m", tmp_path / "none")
    if "self-test: no backend" not in done.stdout:
        pytest.skip("a backend with a test of its own is usable here")
    assert done.returncode == OK and "not looked at" in done.stdout
    assert "not looked at" not in lily("doctor").stdout


def test_a_backend_that_is_not_built_in(lily, standin):
    """Doctor lists it with the reason, and asking for it gives the same reason."""
    absent = [b for b in document(lily("doctor", "--no-selftest", "--json"))["backends"]
              if b["reason"].startswith("not in this build")]
    for b in absent:
        refused(lily("run", "-m", standin, "--backend", b["name"], "hi"), FAILED, b["reason"],
                "lily doctor")
    refused(lily("run", "-m", standin, "--backend", "abacus", "hi"), FAILED, "expected auto")


# ---- checkpoints that are whole but cannot be opened ----------------------------------------------


@pytest.mark.parametrize("name, text, found", [
    ("generation_config.json", "{", "generation_config.json"),
    ("generation_config.json", '{"top_p": "x"}', "top_p"),
    ("generation_config.json", '{"temperature": -1}', "temperature"),
    ("generation_config.json", '{"eos_token_id": 999999}', "eos_token_id"),
    ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": "x"}}',
     "tokenizer.json"),
])
def test_inspect_and_pack_see_what_would_not_open(lily, trained, tmp_path, name, text, found):
    folder = tmp_path / "model"
    shutil.copytree(trained, folder)
    (folder / name).write_text(text)
    done = lily("inspect", folder, "--json")
    assert done.returncode == FAILED, done.stderr
    doc = json.loads(done.stdout)
    assert not doc["ok"] and doc["fault_count"] == 1 and found in doc["faults"][0]
    refused(lily("run", "-m", folder, "hi"), FAILED, found)
    refused(lily("pack", folder, tmp_path / "out"), FAILED, found)
    assert os.listdir(tmp_path) == ["model"]
