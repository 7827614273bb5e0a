"""Servers under test and the clients that treat them well and badly. Only 127.0.0.1 is used; what
is started here is ended here, by its own process object."""

import contextlib
import http.client
import json
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

import openai
import pytest

from conftest import ROOT


# Seconds within which what waits for nothing must happen, on whatever machine; scripts that stand
# for work that goes on last a minute.
SOON = 10


class Server:
    """A running server: its port, its log as it grows, and its end."""

    def __init__(self, words, ready):
        self.process = subprocess.Popen(
            [str(w) for w in words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
        program = Path(words[0]).read_bytes()
        self.sanitized = b"__asan_init" in program or b"__tsan_init" in program
        self.lines = []
        self.expected = 0  # its exit status
        self._log = threading.Thread(target=self._read_log, daemon=True)
        self._log.start()
        self.port = self._wait_port(ready)
        self.url = f"http://127.0.0.1:{self.port}"

    def _read_log(self):
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def _wait_port(self, ready):
        found = queue.Queue()

        def read():
            for line in self.process.stdout:
                match = re.search(ready, line)
                if match:
                    found.put(int(match.group(1)))
            found.put(None)

        threading.Thread(target=read, daemon=True).start()
        port = found.get(timeout=120)
        assert port, f"no port: {self.lines}"
        return port

    def stop(self, number=signal.SIGTERM, seconds=60):
        """Asks it to end and returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(seconds)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._log.join(60)

    def end(self):
        """Asks it to end; it must do so cleanly and without a sanitizer's complaint."""
        status = self.stop()
        complaints = [line for line in self.lines if "Sanitizer" in line or "runtime error" in line]
        assert status == self.expected and not complaints, (status, self.lines[-60:])

    def client(self, **more):
        more = {"max_retries": 0, "timeout": 60, **more}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **more)

    def get(self, path, method="GET", headers=None, body=None, timeout=60):
        """One request on a connection of its own: status, headers, text."""
        with contextlib.closing(
                http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)) as c:
            c.request(method, path, body=body, headers=headers or {})
            r = c.getresponse()
            return r.status, r.headers, r.read().decode()

    def health(self):
        status, _, text = self.get("/health")
        assert status == 200
        return json.loads(text)

    def chat(self, body, headers=None, timeout=60):
        """Posts a chat body (object or bytes): status, headers, text."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.get("/v1/chat/completions", "POST", headers, data, timeout)

    def wait_for(self, condition, seconds=60, step=0.005):
        """Waits until condition(health) holds; returns the seconds it took."""
        start = time.monotonic()
        while True:
            health = self.health()
            if condition(health):
                return time.monotonic() - start
            assert time.monotonic() - start < seconds, health
            time.sleep(step)

    def wait_idle(self, seconds=60):
        return self.wait_for(lambda h: h["state"] == "idle" and h["queued"] == 0, seconds)

    def wait_log(self, pattern, seconds=60):
        """The first log line that matches."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in list(self.lines):
                if re.search(pattern, line):
                    return line
            time.sleep(0.01)
        raise AssertionError(f"no {pattern!r} in {self.lines[-20:]}")

    def memory(self):
        """Resident bytes; 0 when a sanitizer's own memory would be measured."""
        if self.sanitized:
            return 0
        with open(f"/proc/{self.process.pid}/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def raw(self, timeout=60):
        return Raw(self.port, timeout)


class Raw:
    """A plain socket: for what no client library would do."""

    def __init__(self, port, timeout):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self.data = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def send(self, data):
        self.socket.sendall(data if isinstance(data, bytes) else data.encode())
        return self

    def post(self, body, path="/v1/chat/completions", extra=""):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\n{extra}\r\n")
        return self.send(head.encode() + data)

    def read_until(self, text):
        """All that came up to and with the text; later bytes are kept."""
        while text not in self.data:
            more = self.socket.recv(65536)
            assert more, f"closed after {self.data[-300:]!r}"
            self.data += more
        at = self.data.index(text) + len(text)
        before, self.data = self.data[:at], self.data[at:]
        return before

    def read_all(self):
        """Everything until the server closes (or resets)."""
        while True:
            try:
                more = self.socket.recv(65536)
            except ConnectionResetError:
                more = b""
            if not more:
                return self.data
            self.data += more

    def closed_within(self, seconds):
        """Whether the server closes without a byte more than what it already sent."""
        self.socket.settimeout(seconds)
        try:
            self.read_all()
            return True
        except TimeoutError:
            return False

    def close(self):
        self.socket.close()

    def reset(self):
        """Closes with a RST instead of a FIN."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def body(script, **more):
    """A chat body whose last message is the script of the scripted engine."""
    return {"model": "fake", "messages": [{"role": "user", "content": script}], **more}


def events(text):
    """The objects of a stream's data lines, and whether [DONE] ended it."""
    assert text.endswith("\n\n")
    found, done = [], False
    for block in text[:-2].split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        assert not done, "data after [DONE]"
        if block == "data: [DONE]":
            done = True
        else:
            found.append(json.loads(block[6:]))
    return found, done


def joined(chunks):
    """What a client makes of a stream's chunks: the message a whole reply would hold."""
    message = {"content": "", "reasoning_content": "", "tool_calls": []}
    finish = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert finish is None, "a chunk after the terminal one"
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    assert call["type"] == "function"
                    message["tool_calls"].append({"name": call["function"]["name"], "args": ""})
                message["tool_calls"][call["index"]]["args"] += call["function"]["arguments"]
            finish = choice["finish_reason"]
            if finish:
                assert delta == {}
    return message, finish


@pytest.fixture(scope="module")
def fake_serve(request):
    """Starts the scripted server with options; ends all that it started."""
    program = ROOT / Path(request.config.getoption("--lily")).parent / "fake-serve"
    if not program.exists():
        pytest.fail(f"{program}: no such program; run `make {program}`", pytrace=False)
    running = []

    def start(**options):
        words = [program, *(f"{name}={value}" for name, value in options.items())]
        running.append(Server(words, r"^port (\d+)"))
        return running[-1]

    yield start
    for server in running:
        server.end()
