"""The server against clients that are slow, broken or hostile: everything stays bounded and others
are still served."""

import json
import socket
import threading
import time

import pytest

from server_fixtures import SOON, body, events, fake_serve, joined  # noqa: F401 (a fixture)

MIB = 1 << 20


@pytest.fixture(scope="module")
def fake(fake_serve):  # noqa: F811
    return fake_serve(idle=20, body=MIB)


@pytest.fixture(scope="module")
def strict(fake_serve):  # noqa: F811
    """Closes silent connections after two seconds."""
    return fake_serve(idle=2, body=MIB)


# ---- who may ask --------------------------------------------------------------------------------

def test_foreign_host_is_refused(fake):
    for host in ["evil.com", f"evil.com:{fake.port}", "localhost.evil.com", "10.0.0.1", "[::2]"]:
        for path in ["/health", "/v1/models", "/nowhere"]:
            status, _, text = fake.get(path, headers={"Host": host})
            assert status == 403 and json.loads(text)["error"]["code"] == "forbidden_host"
        status, _, _ = fake.chat(body("say x"), headers={"Host": host})
        assert status == 403
    for host in ["localhost", f"localhost:{fake.port}", "127.0.0.1", "[::1]:80", "a.localhost"]:
        assert fake.get("/health", headers={"Host": host})[0] == 200


def test_foreign_origin_is_refused(fake):
    before = fake.health()["totals"]["requests"]
    for origin in ["http://evil.com", "null", f"http://localhost:{fake.port + 1}", "file://"]:
        status, headers, text = fake.chat(body("say x"), headers={"Origin": origin})
        assert status == 403 and json.loads(text)["error"]["code"] == "forbidden_origin"
        assert fake.get("/health", headers={"Origin": origin})[0] == 403
        assert fake.get("/v1/chat/completions", "OPTIONS", headers={
            "Origin": origin, "Access-Control-Request-Method": "POST"})[0] == 403
    own = f"http://127.0.0.1:{fake.port}"
    assert fake.chat(body("say x"), headers={"Origin": own})[0] == 200
    assert fake.health()["totals"]["requests"] == before + 1


def test_host_is_required(fake):
    with fake.raw() as raw:
        raw.send("GET /health HTTP/1.1\r\n\r\n")
        assert b"400" in raw.read_until(b"\r\n")
    with fake.raw() as raw:
        raw.send("GET /health HTTP/1.0\r\n\r\n")
        assert b"200" in raw.read_until(b"\r\n")


# ---- size ---------------------------------------------------------------------------------------

def test_body_over_the_limit(fake):
    status, _, text = fake.chat(b" " * (MIB + 1))
    error = json.loads(text)["error"]
    assert status == 413 and error["code"] == "request_too_large" and str(MIB) in error["message"]
    padded = json.dumps(body("say x")).encode()
    assert fake.chat(padded + b" " * (MIB - len(padded)))[0] == 200


def test_chunked_body_over_the_limit(fake):
    with fake.raw() as raw:
        raw.send("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                 "Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(20):
            raw.send(b"10000\r\n" + b" " * 65536 + b"\r\n")
        raw.send("0\r\n\r\n")
        assert b" 413 " in raw.read_until(b"\r\n")
    with fake.raw() as raw:  # without end: cut
        raw.send("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                 "Transfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(OSError):
            for _ in range(400):
                raw.send(b"10000\r\n" + b" " * 65536 + b"\r\n")
    fake.wait_for(lambda h: h["held_bytes"] == 0)


def test_absurd_length_is_refused_at_once(fake):
    for length in ["999999999999", "18446744073709551615", "99999999999999999999999", "-1", "x"]:
        with fake.raw() as raw:
            raw.send(f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                     f"Content-Length: {length}\r\n\r\n")
            head = raw.read_all()
            assert b" 413 " in head[:20] or b" 400 " in head[:20], (length, head[:60])


def test_expect_continue_is_refused_before_the_body(fake):
    with fake.raw() as raw:
        raw.send(f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                 f"Content-Length: {2 * MIB}\r\nExpect: 100-continue\r\n\r\n")
        assert b" 413 " in raw.read_until(b"\r\n")
    with fake.raw() as raw:
        data = json.dumps(body("say x")).encode()
        raw.send(f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                 f"Content-Length: {len(data)}\r\nExpect: 100-continue\r\n\r\n")
        raw.read_until(b"100 Continue\r\n\r\n")
        raw.send(data)
        assert b" 200 " in raw.read_until(b"\r\n")


@pytest.mark.parametrize("lines, status", [
    ("Content-Length: 62\r\nContent-Length: 5\r\n", 400),
    ("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
    ("Host: evil.com\r\nContent-Length: 0\r\n", 400),
    ("Transfer-Encoding: gzip\r\n", 501), ("Transfer-Encoding: gzip, chunked\r\n", 501),
    ("Content-Encoding: gzip\r\nContent-Length: 0\r\n", 415)])
def test_head_that_can_be_read_two_ways(fake, lines, status):
    with fake.raw() as raw:
        raw.send(f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{lines}"
                 "Connection: close\r\n\r\n")
        head, text = raw.read_all().split(b"\r\n\r\n", 1)
    assert int(head.split()[1]) == status
    assert json.loads(text)["error"]["code"] in ("invalid_head", "unsupported_encoding")


def test_huge_head(fake):
    with fake.raw() as raw:
        raw.send("GET /health HTTP/1.1\r\nHost: localhost\r\n")
        try:
            for n in range(200):
                raw.send(f"X-Header-{n}: {'y' * 1000}\r\n")
            raw.send("\r\n")
            head = raw.read_all()
            assert b" 431 " in head[:20] or b" 413 " in head[:20], head[:60]
        except (BrokenPipeError, ConnectionResetError):
            pass  # closed while we were still sending
    with fake.raw() as raw:
        try:
            raw.send(b"GET /" + b"a" * 200000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 414 " in raw.read_all()[:20]
        except (BrokenPipeError, ConnectionResetError):
            pass
    assert fake.health()["status"] == "ok"


def test_memory_of_all_bodies_is_bounded(fake_serve):  # noqa: F811
    server = fake_serve(body=20 * MIB)  # the least limit for all together is 80 MiB
    raws = []
    for _ in range(12):
        raw = server.raw()
        raw.send(f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                 f"Content-Length: {20 * MIB}\r\n\r\n")
        raw.send(b" " * (17 * MIB))
        raws.append(raw)
    assert server.health()["held_bytes"] <= 80 * MIB
    assert server.memory() < 160 * MIB
    for raw in raws:
        raw.send(b" " * (3 * MIB))
    heads = [raw.read_until(b"\r\n\r\n") for raw in raws]
    assert {head.split()[1] for head in heads} == {b"400", b"503"}
    assert all(b"Retry-After" in head for head in heads if b" 503 " in head)
    for raw in raws:
        raw.close()
    server.wait_for(lambda h: h["held_bytes"] == 0)
    assert server.chat(body("say x"))[0] == 200


def test_bodies_that_grow_when_parsed(fake):
    before = fake.memory()
    for unit in [b"[]", b"{}", b"0", b'""']:
        data = b'{"messages": [' + b",".join([unit] * (MIB // 4)) + b"]}"
        status, _, text = fake.chat(data[:MIB])
        assert status in (400, 413)
        assert "values" in json.loads(text)["error"]["message"]
    assert fake.memory() - before < 120 * MIB


# ---- nonsense -----------------------------------------------------------------------------------

def test_nonsense_is_survived(fake):
    for data in [b"\0" * 100, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET\r\n\r\n", b"\r\n" * 50,
                 b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                 b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                 b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
                 b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n\r\n"]:
        with fake.raw() as raw:
            try:
                raw.send(data)
                raw.socket.shutdown(socket.SHUT_WR)
                assert raw.closed_within(60), data
            except OSError:
                pass
    assert fake.health()["status"] == "ok"
    assert fake.chat(body("say x"))[0] == 200


def test_truncated_bodies(fake):
    data = json.dumps(body("say x")).encode()
    for n in range(0, len(data), 7):
        with fake.raw() as raw:
            raw.send(f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                     f"Content-Length: {len(data)}\r\n\r\n".encode() + data[:n])
    fake.wait_for(lambda h: h["held_bytes"] == 0 and h["connections"] == 1)


# ---- slow ---------------------------------------------------------------------------------------

def test_silent_connection_is_closed(strict):
    start = time.monotonic()
    with strict.raw() as raw:
        assert raw.closed_within(SOON)
    assert 1.5 < time.monotonic() - start


def test_dripped_head_is_cut(strict):
    with strict.raw() as raw:
        start = time.monotonic()
        with pytest.raises(OSError):
            for letter in "GET /health HTTP/1.1\r\nX: " + "y" * 1000:
                raw.send(letter)
                time.sleep(0.1)
        assert time.monotonic() - start < SOON


def test_dripped_body_is_cut(strict):
    with strict.raw() as raw:
        raw.send("POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                 "Content-Length: 2000\r\n\r\n")
        start = time.monotonic()
        with pytest.raises(OSError):
            for _ in range(1000):
                raw.send(" ")
                time.sleep(0.1)
        assert time.monotonic() - start < SOON
    strict.wait_for(lambda h: h["held_bytes"] == 0)


def test_slow_but_steady_body_is_served(strict):
    data = json.dumps(body("say x")).encode()
    data += b" " * (80000 - len(data))
    with strict.raw() as raw:
        raw.send(f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                 f"Content-Length: {len(data)}\r\n\r\n")
        for n in range(0, len(data), 2000):  # 20 kB/s: 4 s in all, twice the idle limit
            raw.send(data[n:n + 2000])
            time.sleep(0.1)
        assert b" 200 " in raw.read_until(b"\r\n")


def test_waiting_for_the_model_has_no_deadline(strict):
    assert "late" in strict.chat(body("silence 3000\nsay late"))[2]
    assert "late" in strict.chat(body("silence 3000\nsay late", stream=True))[2]


def test_reader_that_stops_is_cut_and_never_holds_the_engine(strict):
    before = strict.memory()
    with strict.raw() as raw:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.post(body("repeat 200000 " + "x" * 50, stream=True))
        strict.wait_idle()  # 10 MB of text nobody reads, but the engine is free
        assert strict.memory() - before < 64 * MIB
        assert strict.chat(body("say x"))[0] == 200
        strict.wait_for(lambda h: h["connections"] == 1)


def unchunked(text):
    """The body of a reply in chunked transfer coding."""
    at, payload = text.index(b"\r\n\r\n") + 4, []
    while at < len(text):
        end = text.index(b"\r\n", at)
        size = int(text[at:end], 16)
        payload.append(text[end + 2:end + 2 + size])
        at = end + 4 + size
    return b"".join(payload)


def test_slow_reader_gets_everything(fake):
    with fake.raw() as raw:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # less drains in a minute
        words = 60000
        raw.post(body(f"repeat {words} abcdefgh", stream=True), extra="Connection: close\r\n")
        fake.wait_idle()
        text = raw.read_all()
    chunks, done = events(unchunked(text).decode())
    assert done
    message, finish = joined(chunks)
    assert message["content"] == "abcdefgh" * words and finish == "stop"
    assert len(chunks) < words  # what the reader was late for came joined


# ---- many ---------------------------------------------------------------------------------------

def test_200_connections_at_once(fake_serve):  # noqa: F811
    server = fake_serve(queue=200)
    n = 200
    raws = [server.raw() for _ in range(n)]
    server.wait_for(lambda h: h["connections"] == n + 1)
    for i, raw in enumerate(raws):
        raw.post(body(f"say answer {i} .", stream=i % 2 == 0))
    for i, raw in enumerate(raws):
        text = raw.read_until(b"[DONE]" if i % 2 == 0 else b'"usage"').decode()
        if i % 2:
            assert f'"answer {i} ."' in text
        else:
            content = "".join(c["choices"][0]["delta"].get("content", "") for c in
                              (json.loads(line[6:]) for line in text.split("\n")
                               if line.startswith("data: {")))
            assert content == f"answer {i} ."
        raw.close()
    assert server.health()["totals"]["completed"] == n
    server.wait_for(lambda h: h["connections"] == 1 and h["held_bytes"] == 0)


def test_200_hang_ups_at_once(fake_serve):  # noqa: F811
    server = fake_serve(queue=200)
    raws = [server.raw() for _ in range(200)]
    for i, raw in enumerate(raws):
        raw.post(body("silence 60000", stream=i % 2 == 0))
    server.wait_for(lambda h: h["running"] + h["queued"] == 200)
    for raw in raws:
        raw.reset()
    assert server.wait_idle() < SOON
    server.wait_for(lambda h: h["connections"] == 1 and h["held_bytes"] == 0)
    assert server.health()["totals"]["hang_ups"] == 200


def test_connections_over_the_limit_wait(fake_serve):  # noqa: F811
    server = fake_serve(connections=8, idle=20)
    raws = [server.raw() for _ in range(12)]
    for raw in raws[:8]:
        raw.send("GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b" 200 " in raw.read_all()
    for raw in raws[8:]:
        raw.send("GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b" 200 " in raw.read_all()


def test_churn(fake):
    """Clients of every temper at once, for a few seconds; then all is as it was."""
    def polite():
        for i in range(30):
            status, _, text = fake.chat(body(f"say {i}"))
            assert status in (200, 503)
            assert status == 503 or f'"{i}"' in text

    def rude():
        for i in range(30):
            raw = fake.raw()
            raw.post(body("delay 2\nrepeat 50 x", stream=i % 2 == 0))
            time.sleep(0.002 * (i % 10))
            raw.reset() if i % 3 else raw.close()

    failures = []

    def guarded(work):
        try:
            work()
        except BaseException as e:  # noqa: BLE001 (reported below)
            failures.append(e)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in [polite, rude] * 4]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert not failures and not any(t.is_alive() for t in threads)
    fake.wait_idle()
    fake.wait_for(lambda h: h["connections"] == 1 and h["held_bytes"] == 0)
