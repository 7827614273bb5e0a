"""Options and fixtures of the end-to-end tests: the real binaries, run as a user runs them."""

import os
import pty
import select
import shutil
import subprocess
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "models" / "mini"


def pytest_addoption(parser):
    parser.addoption("--lily", default="build/release/lily", help="the program under test")
    parser.addoption("--reference", default="../shared", help="folder of reference data")


def until(condition, seconds=60, step=0.01):
    """Waits until condition() holds, and returns what it said."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {condition}"
        time.sleep(step)
    return found


def begun(folder, pid, before=()):
    """Whether something is written in folder: under a name, or by pid without one."""
    if {path.name for path in folder.iterdir()} - set(before):
        return True
    for fd in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            if str(fd.readlink()).startswith(f"{folder}/#") and fd.stat().st_blocks:
                return True
        except FileNotFoundError:
            pass  # closed meanwhile
    return False


class Program:
    """A binary. Calling it runs a command to its end; start() leaves it running."""

    def __init__(self, path):
        self.path = Path(path)

    def __call__(self, *args, input=None, timeout=300, **more):
        """Runs it with text on stdin (none by default); stdout and stderr are text."""
        words = [str(self.path), *map(str, args)]
        stdin = {"input": input} if input is not None else {"stdin": subprocess.DEVNULL}
        return subprocess.run(words, capture_output=True, timeout=timeout,
                              encoding="utf-8", errors="surrogateescape", **stdin, **more)

    def start(self, *args, **more):
        words = [str(self.path), *map(str, args)]
        more = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE, **more}
        return subprocess.Popen(words, **more)


class Screen:
    """What is written to a pseudo-terminal: fd is its other side."""

    def __init__(self, fd):
        self.fd = fd
        self.text = ""

    def _read(self, seconds):
        if not select.select([self.fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # Linux: the other side was closed
            data = b""
        self.text += data.decode("utf-8", "replace")
        return bool(data)

    def expect_any(self, seconds=60):
        """Waits until anything appears after all that was expected before."""
        end = time.monotonic() + seconds
        while not self.text:
            left = end - time.monotonic()
            assert left > 0 and self._read(left), f"nothing within {seconds} s"

    def expect(self, text, seconds=60):
        """Waits until text appears after all that was expected before; returns what preceded it."""
        end = time.monotonic() + seconds
        while text not in self.text:
            left = end - time.monotonic()
            assert left > 0, f"no {text!r} within {seconds} s in {self.text!r}"
            assert self._read(left) or text in self.text, f"ended without {text!r}: {self.text!r}"
        before, self.text = self.text.split(text, 1)
        return before

    def close(self):
        os.close(self.fd)


class Terminal(Screen):
    """A program on a pseudo-terminal: what a person at the keyboard sees and types."""

    def __init__(self, words):
        self.status = None
        self.pid, fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm", LC_ALL="C.UTF-8")
            os.execv(words[0], words)
        super().__init__(fd)

    def type(self, text):
        os.write(self.fd, text.encode())

    def prompt(self):
        """Waits for the prompt, and until the line editor has taken the terminal over: what is typed
        before that is echoed twice."""
        before = self.expect("> ")
        until(lambda: not termios.tcgetattr(self.fd)[3] & termios.ICANON)
        return before

    def wait(self, seconds=60):
        """Waits for the end and returns the exit status (128 + signal for a killed program)."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._read(0.05):
            pass
        while time.monotonic() < end and self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code
            else:
                time.sleep(0.02)
        assert self.status is not None, f"still running after {seconds} s: {self.text!r}"
        return self.status

    def close(self):
        if self.status is None:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        super().close()


@pytest.fixture
def terminal():
    """terminal(program, *args): the program on a pseudo-terminal, ended after the test."""
    running = []

    def start(program, *args):
        running.append(Terminal([str(program.path), *map(str, args)]))
        return running[-1]

    yield start
    for one in running:
        one.close()


def program_at(path):
    full = Path(path) if Path(path).is_absolute() else ROOT / path
    if not full.exists():
        pytest.fail(f"{full}: no such program; run `make all core`", pytrace=False)
    return Program(full)


@pytest.fixture(scope="session")
def lily(request):
    return program_at(request.config.getoption("--lily"))


@pytest.fixture(scope="session")
def lily_core(request):
    """The small program, built beside the whole one."""
    return program_at(f"{request.config.getoption('--lily')}-core")


@pytest.fixture(scope="session")
def reference(request):
    folder = Path(request.config.getoption("--reference"))
    folder = folder if folder.is_absolute() else ROOT / folder
    if not folder.is_dir():
        pytest.skip(f"{folder}: no reference folder (make REFERENCE=...)")
    return folder


@pytest.fixture(scope="session")
def trained():
    """The trained stand-in's folder, for tests of what the model has learned."""
    if not (CHECKPOINT / "model.safetensors").exists():
        pytest.skip(f"{CHECKPOINT}: no trained weights")
    return CHECKPOINT


@pytest.fixture(scope="session")
def standin(lily, tmp_path_factory):
    """A small checkpoint folder with a tokenizer: the trained stand-in, or random weights."""
    if (CHECKPOINT / "model.safetensors").exists():
        return CHECKPOINT
    folder = tmp_path_factory.mktemp("standin") / "mini"
    done = lily("synth", folder, "--shape", "mini", "--seed", "1")
    assert done.returncode == 0, done.stderr
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if not (folder / name).exists() and (CHECKPOINT / name).exists():
            shutil.copy(CHECKPOINT / name, folder / name)
    return folder
