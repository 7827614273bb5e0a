"""Every command as a user runs it: help, results, errors, exit statuses, signals, the terminal."""

import json
import os
import pty
import re
import signal
import subprocess
import time

import pytest

from conftest import Screen, begun, until

COMMANDS = ["run", "chat", "serve", "bench", "eval", "tokenize", "inspect", "pack", "synth",
            "doctor", "plan"]
CORE_COMMANDS = [c for c in COMMANDS if c not in ("chat", "serve")]
OK, FAILED, USAGE = 0, 1, 2


def document(done):
    """The one JSON document of a command that succeeded."""
    assert done.returncode == OK, done.stderr
    return json.loads(done.stdout)


def refused(done, status, *parts):
    """The command failed with this status and one line on stderr that holds these parts."""
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    assert re.fullmatch(r"lily: [^\n]+\n", done.stderr), done.stderr
    for part in parts:
        assert part in done.stderr


# ---- help and usage ----------------------------------------------------------------------------


def test_commands_listed(lily, lily_core):
    for program, commands in ((lily, COMMANDS), (lily_core, CORE_COMMANDS)):
        done = program("--help")
        assert done.returncode == OK and done.stderr == ""
        assert re.findall(r"^  (\w+) ", done.stdout, re.M) == commands
        bare = program()
        assert bare.returncode == USAGE and bare.stdout == "" and bare.stderr == done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help(lily, command):
    done = lily(command, "--help")
    assert done.returncode == OK and done.stderr == ""
    assert done.stdout.startswith(f"lily {command}: ")
    assert f"\nusage: lily {command} [options]" in done.stdout
    assert f"\nexample:\n  lily {command}" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    options = re.findall(r"(?m)^  (?:-\w, |    )(--[\w-]+)", done.stdout)
    assert len(set(options)) == len(options) > 1, "an option twice"
    assert lily("help", command).stdout == done.stdout
    # An example is a command line that the parser takes, up to the files it names.
    example = done.stdout.rsplit("example:\n  lily ", 1)[1].split()
    for word in example:
        if word.startswith("-"):
            assert word in done.stdout.rsplit("example:", 1)[0]


@pytest.mark.parametrize("command", CORE_COMMANDS)
def test_core_help(lily, lily_core, command):
    expected = re.sub(r"(?m)^(usage: |)lily ", r"\1lily-core ", lily(command, "--help").stdout, )
    found = lily_core(command, "--help").stdout
    assert found.split("example:")[0] == expected.split("example:")[0]


def test_version(lily):
    done = lily("--version")
    assert done.returncode == OK and re.fullmatch(r"lily \d+\.\d+\.\d+\n", done.stdout)


def test_unknown_command(lily):
    refused(lily("bnech"), USAGE, "bnech", "did you mean bench?")
    refused(lily("frobnicate"), USAGE, "frobnicate: no such command")


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_option(lily, command):
    refused(lily(command, "--jsno" if command != "chat" else "--sytem"), USAGE, "did you mean --")
    refused(lily(command, "--frobnicate"), USAGE, "--frobnicate: no such option")


@pytest.mark.parametrize("words, parts", [
    (["run", "--temperature", "hot", "x"], ["--temperature", '"hot"', "from 0 to 100"]),
    (["run", "--top-p", "2", "x"], ["--top-p", "from 0 to 1"]),
    (["run", "--seed", "-1", "x"], ["--seed", "unsigned"]),
    (["run", "one", "two"], ['"two"', "quote"]),
    (["run", "--max-tokens"], ["--max-tokens", "expected a value"]),
    (["bench", "-p", "0", "-n", "0"], ["neither"]),
    (["bench", "--quick"], ["--quick", "--report"]),
    (["bench", "--report", "x.md", "--ctx", "9"], ["--ctx"]),
    (["bench", "--report", "x.md", "-n", "0"], ["tokens to decode"]),
    (["doctor", "--no-selftest", "--backend", "cpu"], ["--no-selftest"]),
    (["doctor", "-m", "x", "--model-shape", "mini"], ["--model-shape"]),
    (["bench", "-r", "0"], ["--repeat", "from 1"]),
    (["eval"], ["--text", "--ids"]),
    (["eval", "--text", "a", "--ids", "b"], ["--text", "--ids"]),
    (["tokenize", "a", "--decode", "1"], ["--decode"]),
    (["pack", "one"], ["IN OUT"]),
    (["synth", "x", "--layers", "6"], ["--layers", "multiple of 4"]),
    (["serve", "--port", "70000"], ["--port", "65535"]),
    (["doctor", "extra"], ['"extra"']),
    # an empty name is a script's unset variable
    (["run", "-m", "", "x"], ["--model", 'found ""']),
    (["inspect", ""], ['found ""', "[PATH]"]),
    (["pack", "in", ""], ['found ""', "IN OUT"]),
    (["synth", ""], ['found ""']),
    (["serve", "--alias", ""], ["--alias"]),
    # what would have no effect
    (["run", "--raw", "--system", "x", "y"], ["--raw", "--system"]),
    (["run", "--raw", "--no-think", "y"], ["--raw", "--no-think"]),
    (["chat", "--history", "x", "--no-history"], ["--history", "--no-history"]),
    (["tokenize", "--text", "x"], ["--text", "--chat"]),
    (["tokenize", "--tools", "x", "y"], ["--tools", "--chat"]),
    (["tokenize", "--control", "--decode", "1"], ["--control", "--decode"]),
    (["run", "--logit-bias", "x", "y"], ["--logit-bias", "ID=B"]),
    (["chat", "--logit-bias", "1=nan"], ["--logit-bias", "ID=B"]),
])
def test_wrong_usage(lily, words, parts):
    refused(lily(*words), USAGE, *parts)


@pytest.mark.parametrize("words", [
    ["run", "hi"], ["chat"], ["serve", "--port", "0"], ["bench"], ["eval", "--text", os.devnull],
    ["tokenize", "hi"], ["inspect"]])
def test_missing_model(lily, tmp_path, words):
    refused(lily(*words, "-m", tmp_path / "nothing"), FAILED, str(tmp_path / "nothing"))


@pytest.mark.parametrize("text, found", [("{", "line 1"), ("", "line 1"), ("{}", "other JSON"),
                                         ('[\n"\ud800"]', "line 2")])
@pytest.mark.parametrize("words", [["run", "hi", "--tools"], ["chat", "--tools"],
                                   ["tokenize", "--chat"]])
def test_json_files_are_named(lily, standin, tmp_path, words, text, found):
    path = tmp_path / "file.json"
    path.write_text(text.replace("\ud800", "\\ud800"))
    refused(lily(*words, path, "-m", standin), FAILED, str(path), found, "expected")


def test_unknown_backend(lily, standin):
    refused(lily("run", "-m", standin, "--backend", "abacus", "hi"), FAILED, "abacus")


# ---- run ---------------------------------------------------------------------------------------


@pytest.fixture
def ask(lily, standin):
    """lily run on the stand-in."""
    return lambda *args, **more: lily("run", "-m", standin, *args, **more)


def test_run_document(ask):
    doc = document(ask("--json", "--max-tokens", 12, "--seed", 7, "Say hello."))
    assert doc["finish"] in ("stop", "length")
    assert doc["prompt_tokens"] > 5 and doc["cached_tokens"] == 0
    assert 0 < doc["output_tokens"] <= 12 and 0 <= doc["reasoning_tokens"] <= doc["output_tokens"]
    assert doc["prefill_tok_s"] > 0 and doc["seed"] == "7"
    assert doc["engine"]["backend"] and doc["engine"]["memory_bytes"] > 1 << 20
    assert isinstance(doc["text"], str) and isinstance(doc["reasoning"], str)


def test_run_streams_only_the_answer(ask):
    words = ["--seed", 3, "--max-tokens", 40, "Say hello."]
    plain, doc = ask(*words), document(ask("--json", *words))
    assert plain.returncode == OK and plain.stderr == ""
    assert plain.stdout.strip("\n") == doc["text"].strip("\n")


def test_an_answer_that_never_began_is_explained(ask):
    done = ask("--max-tokens", 1, "--seed", 1, "Say hello.")
    assert done.returncode == OK and not done.stdout.strip()
    assert "--max-tokens" in done.stderr and "--no-think" in done.stderr


def test_run_statistics(ask):
    done = ask("--stats", "--no-think", "--max-tokens", 8, "--seed", 1, "Say hello.")
    assert re.fullmatch(r"prompt \d+ tokens \(0 cached\) [\d.]+ tok/s, answer \d+ tokens "
                        r"[\d.]+ tok/s \| \w+, .+ \| memory [\d.]+ MiB\n", done.stderr), done.stderr


def test_run_prompt_sources(ask, tmp_path):
    (tmp_path / "p.txt").write_text("Say hello.")
    common = ["--json", "--temperature", 0, "--max-tokens", 10]
    operand = document(ask(*common, "Say hello."))
    for other in (ask(*common, input="Say hello."),
                  ask(*common, "--file", "-", input="Say hello."),
                  ask(*common, "--file", tmp_path / "p.txt")):
        other = document(other)
        assert (other["text"], other["reasoning"]) == (operand["text"], operand["reasoning"])
    both = document(ask(*common, "--file", tmp_path / "p.txt", "Read this:"))
    joined = document(ask(*common, "Read this:\n\nSay hello."))
    assert both["prompt_tokens"] == joined["prompt_tokens"]
    refused(ask(input=""), FAILED, "found nothing")
    refused(ask("--file", tmp_path / "none"), FAILED, str(tmp_path / "none"))
    refused(ask(input="\udcff\udcfe"), FAILED, "UTF-8")


def test_run_system_and_think(ask):
    common = ["--json", "--temperature", 0, "--max-tokens", 4, "Say hello."]
    plain = document(ask(*common))
    assert document(ask("--system", "Be brief.", *common))["prompt_tokens"] > plain["prompt_tokens"]
    quick = document(ask("--no-think", *common))
    assert quick["reasoning_tokens"] == 0 and quick["reasoning"] == ""
    assert quick["prompt_tokens"] > plain["prompt_tokens"]  # the block is closed


def test_run_raw(ask):
    raw = document(ask("--raw", "--json", "--max-tokens", 1, "<|im_start|>"))
    assert raw["prompt_tokens"] == 1


def test_greedy_repeats(ask):
    words = ["--json", "--temperature", 0, "--max-tokens", 30, "--seed"]
    texts = {(d["text"], d["reasoning"]) for d in
             (document(ask(*words, seed, "Tell a story.")) for seed in (1, 1, 2))}
    assert len(texts) == 1


def test_seeds(ask):
    words = ["--json", "--no-think", "--temperature", 1.5, "--top-k", 0, "--top-p", 1,
             "--max-tokens", 30, "Tell a story.", "--seed"]
    texts = [document(ask(*words, seed))["text"] for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) == 3
    free = [document(ask(*words[:-1])) for _ in range(2)]
    assert free[0]["seed"] != free[1]["seed"] and free[0]["text"] != free[1]["text"]
    assert document(ask(*words, free[0]["seed"]))["text"] == free[0]["text"]


def test_logit_bias(lily, standin, ask):
    ids = document(lily("tokenize", "-m", standin, "--json", "!"))["ids"]
    assert len(ids) == 1
    doc = document(ask("--json", "--no-think", "--temperature", 0, "--presence-penalty", 0,
                       "--max-tokens", 9, "--logit-bias", f"{ids[0]}=100", "Hi"))
    assert doc["text"] == "!" * 9 and doc["finish"] == "length" and doc["output_tokens"] == 9
    refused(ask("--logit-bias", "!=3", "Hi"), USAGE, "--logit-bias", "ID=B")


def test_context_end(ask):
    refused(ask("--ctx", 64, "word " * 400), FAILED, "context")


def endless(lily, standin):
    """Options that keep an answer running: its end tokens are forbidden."""
    words = ["-m", str(standin), "--no-think", "--seed", "1", "--ctx", "30000"]
    for name in ("<|im_end|>", "<|endoftext|>"):
        ids = document(lily("tokenize", "-m", standin, "--control", "--json", name))["ids"]
        assert len(ids) == 1
        words += ["--logit-bias", f"{ids[0]}=-1000"]
    return words


def test_stop_strings(lily, standin):
    words = ["run", *endless(lily, standin), "--json", "--temperature", 1, "--top-k", 0, "--top-p",
             1, "--max-tokens", 80, "Tell a story."]
    text = document(lily(*words))["text"]
    # Pieces of three characters cross token borders somewhere; what is no text cannot be asked for.
    stops = [text[i:i + 3] for i in range(5, len(text) - 3, 4) if "\ufffd" not in text[i:i + 3]]
    assert len(stops) >= 4
    for stop in stops[:8]:
        doc = document(lily(*words, "--stop", "never in any text \u2603", "--stop", stop))
        assert doc["text"] == text[:text.index(stop)] and doc["finish"] == "stop"


def test_run_interrupt(lily, standin):
    process = lily.start("run", *endless(lily, standin), "--stats", "Tell a story.")
    assert process.stdout.read(1)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 10  # the rest would take longer
    assert process.returncode == 128 + signal.SIGINT
    assert out.endswith(b"\n") and re.match(rb"prompt \d+ tokens .*, answer \d+ tokens", err)


def test_run_interrupt_in_the_prompt(lily, standin, tmp_path):
    """The speed is that of the tokens read, not of those that were still to come."""
    (tmp_path / "long.txt").write_text("the river runs past old houses " * 12000)
    fd, side = pty.openpty()
    process = lily.start("run", "-m", standin, "--ctx", 180000, "--file", tmp_path / "long.txt",
                         "--stats", "--max-tokens", 1, stderr=side)
    os.close(side)
    screen = Screen(fd)
    screen.expect("prompt [")  # the bar
    process.send_signal(signal.SIGINT)
    line = screen.expect("tok/s, answer").rsplit("prompt ", 1)[1]
    process.communicate(timeout=60)
    screen.close()
    assert process.returncode == 128 + signal.SIGINT
    read, whole = re.match(r"(?:(\d+) of )?(\d+) tokens", line).groups()
    assert read and int(read) < int(whole), line


def test_run_interrupt_json(lily, standin):
    for pause in (0.5, 2, 8):  # until a machine that is busy has made a token
        process = lily.start("run", *endless(lily, standin), "--json", "--verbose", "--max-tokens",
                             1000000, "Tell a story.")
        while b"max_tokens: 1000000 lowered" not in (line := process.stderr.readline()):
            assert line
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT
        doc = json.loads(out)
        assert doc["finish"] == "cancelled"
        if doc["output_tokens"]:
            break
    assert doc["output_tokens"] > 0


def test_run_reader_leaves(lily, standin):
    process = lily.start("run", *endless(lily, standin), "Tell a story.")
    assert process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=60) == OK
    assert process.stderr.read() == b""


@pytest.mark.parametrize("words", [["--system", b"\xff", "hi"], [b"\xff"], ["--raw", b"\xff"]])
def test_run_refuses_what_is_not_utf8(lily, standin, words):
    done = subprocess.run([lily.path, "run", "-m", standin, *words], capture_output=True,
                          stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == FAILED and done.stdout == b""
    assert re.fullmatch(rb"lily: .*UTF-8.*\n", done.stderr)


def test_closed_standard_streams(lily, standin):
    """Their numbers are not given to sockets and files, which would then get the output."""
    def close():
        os.close(0)
        os.close(1)

    process = lily.start("serve", "-m", standin, "--port", 0, "--host", "0.0.0.0", "--json", "-q",
                         stdin=None, stdout=None, preexec_fn=close)
    assert b"reachable" in process.stderr.readline()  # it serves
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == FAILED
    assert re.fullmatch(r"lily: standard output: .+\n", err.decode())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words", [["run", "Hi", "--max-tokens", "9", "--no-think"], ["doctor"],
                                   ["tokenize", "hi", "--json"], ["--help"]])
def test_output_full(lily, standin, words):
    model = ["-m", standin] if words[0] in ("run", "tokenize") else []
    with open("/dev/full", "w") as full:
        process = lily.start(*words, *model, stdout=full)
        _, err = process.communicate(timeout=60)
    assert process.returncode == FAILED
    assert re.fullmatch(r"lily: standard output: .+\n", err.decode())


def test_run_on_a_terminal(lily, standin, terminal):
    t = terminal(lily, "run", "-m", standin, "--seed", 1, "--max-tokens", 20, "Say hello.")
    seen = t.expect("tok/s |")
    assert t.wait() == OK
    assert "\033[2m" in seen  # the reasoning, dimmed
    assert "\033[0m" in seen.split("\033[2m")[-1]


# ---- tokenize ----------------------------------------------------------------------------------

SAMPLE = "Hello, w\u00f6rld!  \u4f60\u597d \U0001f600\n\ttabs and 12345 numbers"


def test_tokenize_round_trip(lily, standin):
    doc = document(lily("tokenize", "-m", standin, "--json", SAMPLE))
    assert doc["n"] == len(doc["ids"]) > 5
    ids = ",".join(map(str, doc["ids"]))
    assert lily("tokenize", "-m", standin, "--decode", ids).stdout == SAMPLE
    back = document(lily("tokenize", "-m", standin, "--json", "--decode", json.dumps(doc["ids"])))
    assert back == {"text": SAMPLE}
    lines = lily("tokenize", "-m", standin, SAMPLE).stdout.splitlines()
    assert [int(line.split()[0]) for line in lines] == doc["ids"]
    assert '"\\n"' in "".join(lines) or "\\n" in "".join(lines)


def test_tokenize_control(lily, standin):
    def count(*more):
        return document(lily("tokenize", "-m", standin, "--json", "<|im_start|>", *more))["n"]

    assert count("--control") == 1 and count() > 1


def test_tokenize_sources(lily, standin, tmp_path):
    (tmp_path / "t.txt").write_text(SAMPLE)
    expected = document(lily("tokenize", "-m", standin, "--json", SAMPLE))
    assert document(lily("tokenize", "-m", standin, "--json", "-f", tmp_path / "t.txt")) == expected
    assert document(lily("tokenize", "-m", standin, "--json", input=SAMPLE)) == expected
    assert document(lily("tokenize", "-m", standin, "--json", ""))["n"] == 0
    refused(lily("tokenize", "-m", standin, "--decode", "99999999"), FAILED, "99999999")
    refused(lily("tokenize", "-m", standin, "--decode", "one"), FAILED, "token ids")
    refused(lily("tokenize", "-m", standin, input="a\udcffb"), FAILED, "UTF-8")


def test_tokenize_chat(lily, standin, tmp_path):
    (tmp_path / "m.json").write_text(json.dumps([{"role": "user", "content": "Hi <|im_end|>"}]))
    text = lily("tokenize", "-m", standin, "--chat", tmp_path / "m.json", "--text")
    assert text.stdout == ("<|im_start|>user\nHi <|im_end|><|im_end|>\n"
                           "<|im_start|>assistant\n<think>\n")
    doc = document(lily("tokenize", "-m", standin, "--chat", tmp_path / "m.json", "--json"))
    assert doc["text"] == text.stdout and doc["n"] == len(doc["ids"])
    # What the user typed stays text: it costs more tokens than the control token.
    end = document(lily("tokenize", "-m", standin, "--control", "--json", "<|im_end|>"))["ids"][0]
    assert doc["ids"].count(end) == 1
    quick = lily("tokenize", "-m", standin, "--chat", tmp_path / "m.json", "--text", "--no-think")
    assert quick.stdout.endswith("<think>\n\n</think>\n\n")
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    (tmp_path / "t.json").write_text(json.dumps(tools))
    with_tools = lily("tokenize", "-m", standin, "--chat", tmp_path / "m.json", "--text",
                      "--tools", tmp_path / "t.json")
    assert "get_weather" in with_tools.stdout and with_tools.stdout.startswith("<|im_start|>system")
    (tmp_path / "bad.json").write_text("[{]")
    refused(lily("tokenize", "-m", standin, "--chat", tmp_path / "bad.json"), FAILED)


# ---- bench -------------------------------------------------------------------------------------


def test_bench_rows(lily, standin):
    words = ["bench", "-m", standin, "-p", "8,16", "-n", "4", "-d", "0,32", "-r", "2"]
    rows = document(lily(*words, "--json"))
    assert [(r["test"], r["n"], r["depth"]) for r in rows] == [
        ("prefill", 8, 0), ("prefill", 16, 0), ("decode", 4, 0),
        ("prefill", 8, 32), ("prefill", 16, 32), ("decode", 4, 32)]
    for row in rows:
        assert row["tok_s"] > 0 and row["spread"] >= 0 and row["digest_repeats"] is True
        assert len(row["runs_tok_s"]) == 2
        runs = sorted(row["runs_tok_s"])
        assert row["tok_s"] == pytest.approx(sum(runs) / 2)
        assert row["spread"] == pytest.approx((runs[1] - runs[0]) / row["tok_s"], abs=1e-6)
        if row["test"] == "decode":
            assert row["gb_s"] > 0
            assert row["fraction_of_bound"] == pytest.approx(row["gb_s"] / row["bound_gb_s"])
        else:
            assert row["gb_s"] is None and row["fraction_of_bound"] is None
    again = document(lily(*words, "--json"))
    assert [r["digest"] for r in again] == [r["digest"] for r in rows]
    # Depths are one sequence: reading 16 tokens at 0 is not reading 16 at 32.
    assert len({r["digest"] for r in rows}) == len(rows)
    table = lily(*words)
    assert table.returncode == OK and table.stderr == ""
    for row in rows:
        assert row["digest"] in table.stdout


@pytest.mark.parametrize("threads, shown", [(1, "1 thread,"), (3, "3 threads,")])
def test_device_names_the_threads_in_use(lily, standin, threads, shown):
    words = ["-p", "1", "-n", "1", "-d", "0", "-r", "1", "--threads", threads, "--json"]
    rows = document(lily("bench", "-m", standin, *words))
    assert all(shown in row["device"] for row in rows)


def test_bench_beyond_context(lily, standin):
    done = lily("bench", "-m", standin, "-p", "200", "-n", "1", "-d", "0", "-r", "1", "--ctx", 64)
    assert done.returncode == FAILED and done.stderr.startswith("lily: ")


REPORT_WORDS = ["-p", "16,64", "-n", "4", "-r", "1", "--backend", "cpu", "--threads", "1"]


def test_bench_report(lily, standin, tmp_path):
    """Both forms hold the same document, and each row is that of a run of its own."""
    path, table = tmp_path / "report.json", tmp_path / "report.md"
    done = lily("bench", "-m", standin, *REPORT_WORDS, "--report", path, "--note", "two cores")
    assert done.returncode == OK and str(path) in done.stdout
    doc = json.loads(path.read_text())
    assert doc["lily_report"] == 1 and doc["note"] == "two cores"
    assert doc["program"]["version"] and doc["program"]["commit"]
    assert doc["machine"]["cores"] > 0 and doc["machine"]["os_version"]
    assert doc["run"]["backend"] == "cpu" and doc["run"]["layers"] == 8
    assert re.fullmatch("[0-9a-f]{64}", doc["run"]["checkpoint"])
    assert doc["run"]["comparable_with_published"] is False
    assert [r["n"] for r in doc["prefill"]] == [16, 64] == [r["depth"] for r in doc["decode"]]
    assert doc["left_out"] == []
    for row in doc["prefill"] + doc["decode"]:
        assert row["tok_s"] > 0 and row["digest_repeats"] and row["bandwidth_gb_s"] > 0
        assert row["published"] is None  # the stand-in is not their model
    for row in doc["decode"]:
        assert row["fraction_of_bandwidth"] == pytest.approx(row["gb_s"] / row["bandwidth_gb_s"])
    alone = document(lily("bench", "-m", standin, "-p", "0", "-n", "4", "-d", "64", "-r", "1",
                          "--threads", "1", "--json"))
    assert [r["digest"] for r in alone] == [doc["decode"][1]["digest"]]
    assert lily("bench", "-m", standin, *REPORT_WORDS, "--report", table).returncode == OK
    text = table.read_text()
    again = json.loads(text.split("```json")[1].split("```")[0])
    assert [r["digest"] for r in again["decode"]] == [r["digest"] for r in doc["decode"]]
    for row in doc["prefill"]:
        assert f"| {row['n']} |" in text and row["digest"] in text


def test_bench_report_leaves_out(lily, standin, tmp_path):
    """A row that cannot be measured is named with the reason; the others are there."""
    path = tmp_path / "report.json"
    done = lily("bench", "-m", standin, "-p", "1000", "-d", "300000", "-n", "2", "-r", "1", "--minutes",
                "10000", "--report", path)
    doc = json.loads(path.read_text())
    assert done.returncode == OK and done.stdout.endswith(", 2 rows left out\n")
    assert [r["n"] for r in doc["prefill"]] == [1000]
    assert [(r["test"], r["n"]) for r in doc["left_out"]] == [("prefill", 300000),
                                                             ("decode", 300000)]
    assert all("262144" in r["why"] for r in doc["left_out"])


def test_bench_report_interrupted(lily, standin, tmp_path):
    """What was measured stays; the row that was running ends with the program."""
    path = tmp_path / "report.json"
    running = lily.start("bench", "-m", standin, "-p", "8,4000", "-n", "2", "-r", "9",
                         "--backend", "ref", "--minutes", "10000", "--report", path, text=True)
    lines = [running.stdout.readline() for _ in range(3)]
    assert lines[1].startswith("prefill") and lines[2].startswith("decode")
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130 and "interrupted" in errors
    doc = json.loads(path.read_text())
    assert [r["n"] for r in doc["prefill"]] == [8] and doc["left_out"] == []


def test_bench_report_of_nothing(lily, tmp_path):
    done = lily("bench", "-m", tmp_path / "absent", "--quick", "--report", tmp_path / "r.json")
    assert done.returncode == FAILED and "no row" in done.stderr
    done = lily("bench", "--quick", "--report", tmp_path / "no" / "r.json")
    assert done.returncode == FAILED and "cannot create" in done.stderr


# ---- inspect, doctor ---------------------------------------------------------------------------


def test_inspect(lily, standin, tmp_path):
    doc = document(lily("inspect", standin, "--json"))
    assert lily("inspect", "-m", standin, "--json").stdout == json.dumps(doc, indent=2,
                                                                         ensure_ascii=False) + "\n"
    text = lily("inspect", standin)
    assert text.returncode == OK and "mini" in text.stdout and "MiB" in text.stdout
    (tmp_path / "config.json").write_text("{}")
    done = lily("inspect", tmp_path)
    assert done.returncode == FAILED


def test_doctor(lily):
    doc = document(lily("doctor", "--json"))
    backends = {b["name"]: b for b in doc["backends"]}
    assert backends["ref"]["usable"] and all(b["reason"] for b in backends.values())
    assert doc["machine"]["memory_total_bytes"] > 1 << 28
    assert all(test["passed"] for test in doc["selftest"])
    text = lily("doctor").stdout
    assert "ref" in text and "GiB" in text and "self-test" in text
    # What the system does not tell is a dash: no line of the machine ends behind its name.
    machine = text.split("machine:\n")[1].split("backends:")[0]
    assert all(len(line.split("  ", 2)[2].strip()) for line in machine.splitlines())
    assert "selftest" not in document(lily("doctor", "--json", "--no-selftest"))
    refused(lily("doctor", "--backend", "ref"), FAILED, "self-test")


# ---- plan --------------------------------------------------------------------------------------


def test_plan_without_a_plan(lily):
    """Which backends record one depends on the build: the message names them."""
    refused(lily("plan", "--backend", "ref"), FAILED, "backend ref: records no plan")
    refused(lily("plan", "--backend", "abacus"), FAILED, 'found "abacus"')
    refused(lily("plan"), USAGE, "--backend")
    refused(lily("plan", "--backend", "ref", "--layers", "6"), USAGE, "multiple of 4")
    refused(lily("plan", "--backend", "ref", "--tokens", "0"), USAGE, "--tokens")


def planning(lily):
    """The backends of this build that record plans, as the message lists them."""
    message = lily("plan", "--backend", "abacus").stderr
    names = message.strip().rsplit(": ", 1)[1]
    return [] if names == "none in this build" else names.split(", ")


def test_plan(lily, lily_core):
    names = planning(lily)
    if not names:
        pytest.skip("no backend of this build records a plan")
    for name in names:
        done = lily("plan", "--backend", name, "--json")
        doc = document(done)
        assert (doc["backend"], doc["shape"], doc["layers"]) == (name, "qwen3.6-35b-a3b", 40)
        assert doc["least_per_token"] == {
            "weight_bytes": 1669561728, "state_bytes": 62914560, "convolution_bytes": 2949120,
            "kv_per_depth_bytes": 20480}
        steps = doc["steps"]
        assert [s["tokens"] for s in steps] == [1, 1, 1, 1, 512]
        assert [s["depth"] for s in steps] == [0, 4096, 32768, 131072, 0]
        for step in steps[:4]:
            assert step["kernels"] > 0 and step["stages"] > 0
            assert step["unique_bytes"] == (step["weight_bytes"] + step["state_bytes"]
                                            + step["kv_bytes"])
            assert step["least_bytes"] == (1669561728 + 62914560 + 2949120
                                           + 20480 * step["depth"])
            assert step["read_bytes"] >= step["unique_bytes"] >= step["least_bytes"]
            assert abs(step["of_least"] - step["unique_bytes"] / step["least_bytes"]) < 1e-5
        assert lily("plan", "--backend", name, "--json").stdout == done.stdout
        assert document(lily_core("plan", "--backend", name, "--json")) == doc
        mini = document(lily("plan", "--backend", name, "--model-shape", "mini", "--layers", 4,
                             "--depth", "0,100", "--json"))
        assert mini["layers"] == 4 and [s["depth"] for s in mini["steps"]] == [0, 100]
        table = lily("plan", "--backend", name)
        assert table.returncode == OK and table.stderr == ""
        rows = [line.split() for line in table.stdout.splitlines()]
        first = rows.index([w for w in next(r for r in rows if r[:2] == ["tokens", "depth"])]) + 1
        assert [r[:2] for r in rows[first:]] == [[str(s["tokens"]), str(s["depth"])]
                                                 for s in steps]


# ---- pack, synth -------------------------------------------------------------------------------


def test_pack(lily, standin, ask, tmp_path):
    out = tmp_path / "mini.lily"
    doc = document(lily("pack", standin, out, "--json"))
    assert doc["bytes"] == out.stat().st_size > 1 << 20
    assert os.listdir(tmp_path) == ["mini.lily"]
    refused(lily("pack", standin, out), FAILED, str(out), "--force")
    assert lily("pack", standin, out, "--force").returncode == OK
    words = ["--json", "--temperature", 0, "--max-tokens", 20, "Say hello."]
    packed, folder = document(lily("run", "-m", out, *words)), document(ask(*words))
    assert (packed["text"], packed["reasoning"]) == (folder["text"], folder["reasoning"])
    assert document(lily("inspect", out, "--json"))
    refused(lily("pack", tmp_path / "none", tmp_path / "x"), FAILED, str(tmp_path / "none"))
    refused(lily("pack", standin, tmp_path), FAILED, "folder")
    assert os.listdir(tmp_path) == ["mini.lily"]


def test_synth(lily, tmp_path):
    doc = document(lily("synth", tmp_path / "a", "--shape", "mini", "--layers", 4, "--seed", 3,
                        "--json"))
    assert doc["shape"] == "mini" and doc["layers"] == 4 and doc["seed"] == 3
    for force in [[], ["--force"]]:  # a folder is never written over
        refused(lily("synth", tmp_path / "a", "--shape", "mini", *force), FAILED, "remove it")
    packed = ["synth", tmp_path / "p", "--shape", "mini", "--layers", 4, "--packed"]
    assert lily(*packed).returncode == OK
    refused(lily(*packed), FAILED, "--force")
    assert lily(*packed, "--force").returncode == OK
    assert lily("synth", tmp_path / "b", "--shape", "mini", "--layers", 4,
                "--seed", 3).returncode == OK
    a, b = ((tmp_path / x / "model.safetensors").read_bytes() for x in "ab")
    assert a == b
    refused(lily("synth", tmp_path / "c", "--shape", "giant"), FAILED, "giant")


@pytest.mark.parametrize("packed", [False, True])
def test_synth_interrupt(lily, tmp_path, packed):
    words = ["synth", tmp_path / "big", "--layers", "8"] + (["--packed"] if packed else [])
    process = lily.start(*words)
    until(lambda: begun(tmp_path, process.pid))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, err
    assert err == b"lily: interrupted\n"
    assert os.listdir(tmp_path) == []


# ---- chat --------------------------------------------------------------------------------------


@pytest.fixture
def chat(lily, standin, terminal, tmp_path):
    return lambda *args: terminal(lily, "chat", "-m", standin, "--seed", 1, "--history",
                                  tmp_path / "history", *args)


def test_chat(chat, tmp_path):
    t = chat("--max-tokens", 30)
    t.expect("Ctrl-D leaves")
    t.prompt()
    t.type("Say hello.\r")
    first = t.expect("tok/s, answer")
    assert "\033[2m" in first  # the reasoning, dimmed
    assert "(0 cached)" in first
    t.prompt()
    t.type("And again.\r")
    assert re.search(r"\(\d+ cached\)", t.expect("tok/s, answer"))
    t.prompt()
    t.type("\x04")
    assert t.wait() == OK
    history = (tmp_path / "history").read_text()
    assert "again" in history and (tmp_path / "history").stat().st_mode & 0o077 == 0


def test_chat_follow_up_reads_the_new_turn_only(trained, chat):
    t = chat()
    prompts = []
    for text in ("What is 3 + 4?", "And 5 + 2?"):
        t.prompt()
        t.type(text + "\r")
        found = re.search(r"prompt (\d+) tokens \((\d+) cached\)", t.expect("tok/s, answer"))
        prompts.append([int(n) for n in found.groups()])
    (first, none), (second, cached) = prompts
    assert none == 0 and cached >= first and second - cached < 40
    t.prompt()
    t.type("\x04")
    assert t.wait() == OK


def test_chat_interrupt(lily, standin, terminal, tmp_path):
    t = terminal(lily, "chat", *endless(lily, standin), "--no-history")
    t.prompt()
    t.type("Tell a story.\r")
    t.expect("\n")
    t.expect_any()  # the answer begins
    t.type("\x03")
    t.expect("(stopped)")
    t.prompt()
    t.type("half a line\x03")  # at the prompt: a fresh line, not the end
    t.expect("(Ctrl-D leaves)")
    t.prompt()
    t.type("More.\r")
    t.expect("\n")
    time.sleep(0.5)
    t.type("\x03")
    t.expect("(stopped)")
    t.prompt()
    t.type("\x04")
    assert t.wait() == OK
    assert os.listdir(tmp_path) == []


def test_chat_interrupt_within_a_write(lily, standin, terminal):
    t = terminal(lily, "chat", *endless(lily, standin), "--no-history")
    t.prompt()
    t.type("Tell a story.\r")
    t.expect("\n")
    t.expect_any()
    t.type("\x13")  # Ctrl-S: the terminal takes no more, and the next piece waits in a write
    time.sleep(0.5)
    os.kill(t.pid, signal.SIGINT)
    time.sleep(0.1)
    t.type("\x11")  # Ctrl-Q
    t.expect("(stopped)")
    t.prompt()
    t.type("\x04")
    assert t.wait() == OK


def test_chat_commands(chat, tmp_path):
    t = chat("--no-think", "--max-tokens", 8, "--system", "Be brief.")
    t.prompt()
    t.type("/help\r")
    for word in ("/reset", "/think", "/system", "/save", "/quit"):
        t.expect(word)
    t.type("/thnik\r")
    t.expect("did you mean /think")
    t.type("/think on\r")
    t.expect("thinking is on")
    t.type("/think off\r")
    t.expect("thinking is off")
    t.type("one \\\rtwo\r")
    t.expect("tok/s, answer")
    t.type(f"/save {tmp_path / 'talk.json'}\r")
    t.expect("saved to")
    messages = json.loads((tmp_path / "talk.json").read_text())
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert messages[1]["content"] == "one \ntwo"
    t.type("/reset\r")
    t.expect("a new conversation")
    t.type("/system Speak.\r")
    t.expect("system message set")
    t.type(f"/save {tmp_path / 'empty.json'}\r")
    t.expect("saved to")
    assert json.loads((tmp_path / "empty.json").read_text()) == [
        {"role": "system", "content": "Speak."}]
    t.type("/quit\r")
    assert t.wait() == OK


def test_chat_recalls(chat):
    for _ in range(2):
        t = chat("--no-think", "--max-tokens", 4)
        t.prompt()
        t.type("/think off\r" if _ == 0 else "\033[A\r")  # the second time: arrow up
        t.expect("thinking is off")
        t.prompt()
        t.type("\x04")
        assert t.wait() == OK


def test_chat_leaves_a_file_that_is_no_history(lily, standin, terminal, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine\n")
    t = terminal(lily, "chat", "-m", standin, "--history", notes)
    t.expect("found no history")
    t.prompt()
    t.type("/help\r")
    t.expect("Ctrl-D leaves.")
    t.prompt()
    t.type("\x04")
    assert t.wait() == OK
    assert notes.read_text() == "mine\n"


def test_chat_typed_ahead(chat):
    """What is typed while an answer runs is not lost, the end of input included."""
    t = chat("--no-think", "--max-tokens", 200)
    t.prompt()
    t.type("Tell a story.\r")
    t.expect("\n")
    t.type("/think off\r\x04")
    t.expect("thinking is off")
    assert t.wait() == OK


def test_chat_piped(lily, standin):
    """Without a terminal it takes turns line by line and prints the answers alone."""
    done = lily("chat", "-m", standin, "--no-think", "--temperature", 0, "--max-tokens", 8,
                input="Say hello.\n/think off\nAgain")
    assert done.returncode == OK and done.stderr == ""
    assert "thinking is off" in done.stdout and "\033" not in done.stdout
    single = lily("run", "-m", standin, "--no-think", "--temperature", 0, "--max-tokens", 8,
                  "Say hello.")
    assert done.stdout.startswith(single.stdout)


def test_chat_ends_on_sigterm(chat):
    t = chat()
    t.prompt()
    os.kill(t.pid, signal.SIGTERM)
    assert t.wait() == 128 + signal.SIGTERM


# ---- serve, core -------------------------------------------------------------------------------


def test_serve_starts_and_stops(lily, standin):
    process = lily.start("serve", "-m", standin, "--port", "0", "--json")
    text = b""
    while not text.endswith(b"\n}\n"):
        line = process.stdout.readline()
        assert line, process.stderr.read()
        text += line
    doc = json.loads(text)
    assert doc["url"] == f"http://127.0.0.1:{doc['port']}" and doc["port"] > 0
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == OK and b"authentication" not in err


@pytest.mark.parametrize("host, warned", [("0.0.0.0", True), ("LocalHost", False)])
def test_serve_warns_off_loopback(lily, standin, host, warned):
    process = lily.start("serve", "-m", standin, "--port", "0", "--host", host)
    assert f"http://{host}:".encode() in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (b"no authentication" in err) == warned


def test_core_runs(lily, lily_core, standin):
    words = ["run", "-m", standin, "--json", "--temperature", 0, "--max-tokens", 20, "Say hello."]
    whole, core = document(lily(*words)), document(lily_core(*words))
    assert (core["text"], core["reasoning"]) == (whole["text"], whole["reasoning"])
    refused(lily_core("serve"), USAGE, "serve: no such command")


# ---- the embedded stand-in ---------------------------------------------------------------------


def test_embedded(lily, trained):
    doc = document(lily("run", "--json", "--temperature", 0, "--max-tokens", 20, "Say hello."))
    folder = document(lily("run", "-m", trained, "--json", "--temperature", 0, "--max-tokens", 20,
                           "Say hello."))
    assert doc["engine"]["kind"] == "embedded"
    assert (doc["text"], doc["reasoning"]) == (folder["text"], folder["reasoning"])


def test_demo(lily, trained):
    import subprocess
    from conftest import ROOT
    done = subprocess.run([ROOT / "tools" / "demo.sh", lily.path], capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == OK, done.stderr
    assert re.search(r"prompt \d+ tokens .* tok/s, answer \d+ tokens [\d.]+ tok/s \| \w+, .* "
                     r"\| memory [\d.]+ MiB", done.stdout + done.stderr)
