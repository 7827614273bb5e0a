"""The server over the scripted engine: protocol, errors, hang-ups, queue, keep-alive, shutdown."""

import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time

import openai
import pytest

from server_fixtures import SOON, body, events, fake_serve, joined  # noqa: F401 (a fixture)


@pytest.fixture(scope="module")
def fake(fake_serve):
    return fake_serve(idle=20)


# ---- replies ------------------------------------------------------------------------------------

SCRIPT = "think let me see\nsay Hello there, world\ncall f {\"a\": [1, 2]}\ncall g"


def test_stream_is_openais_to_the_byte(fake):
    status, headers, text = fake.chat(body(SCRIPT, stream=True))
    assert status == 200
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    chunks, done = events(text)
    assert done
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["id"] == chunks[0]["id"] and chunk["id"].startswith("chatcmpl-")
        assert chunk["model"] == "fake" and chunk["created"] == chunks[0]["created"]
        assert chunk["system_fingerprint"] and "usage" not in chunk
        (choice,) = chunk["choices"]
        assert choice["index"] == 0
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None,
                                        "finish_reason": "tool_calls"}
    names = [c for c in chunks if "tool_calls" in c["choices"][0]["delta"]
             and "id" in c["choices"][0]["delta"]["tool_calls"][0]]
    ids = [c["choices"][0]["delta"]["tool_calls"][0]["id"] for c in names]
    assert len(set(ids)) == 2


def test_usage_chunk_only_when_asked_for(fake):
    _, _, text = fake.chat(body(SCRIPT, stream=True, stream_options={"include_usage": True}))
    chunks, done = events(text)
    assert done
    assert all(c["usage"] is None and c["choices"] for c in chunks[:-1])
    last = chunks[-1]
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] == len(SCRIPT)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_streamed_equals_whole(fake):
    _, _, text = fake.chat(body(SCRIPT, stream=True))
    streamed, finish = joined(events(text)[0])
    _, headers, text = fake.chat(body(SCRIPT))
    assert headers["Content-Type"] == "application/json"
    whole = json.loads(text)
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == finish == "tool_calls"
    message = choice["message"]
    assert message["role"] == "assistant" and message["refusal"] is None
    assert message["content"] == streamed["content"] == "Hello there, world"
    assert message["reasoning_content"] == streamed["reasoning_content"] == "let me see"
    calls = [{"name": c["function"]["name"], "args": c["function"]["arguments"]}
             for c in message["tool_calls"]]
    assert calls == streamed["tool_calls"]
    assert calls == [{"name": "f", "args": '{"a": [1, 2]}'}, {"name": "g", "args": "{}"}]


def test_openai_client(fake):
    client = fake.client()
    whole = client.chat.completions.create(**body(SCRIPT))
    message = whole.choices[0].message
    assert message.content == "Hello there, world"
    assert message.reasoning_content == "let me see"
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": [1, 2]}
    assert whole.usage.completion_tokens_details.reasoning_tokens == 3
    text, calls, usage = "", [], None
    for chunk in client.chat.completions.create(
            **body(SCRIPT), stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
    assert text == message.content
    assert [c.function.name for c in calls if c.id] == ["f", "g"]
    assert usage.total_tokens == whole.usage.total_tokens
    with client.chat.completions.stream(**body("say a b c")) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "a b c"


def test_finish_reasons(fake):
    def finish(script, **more):
        return json.loads(fake.chat(body(script, **more))[2])["choices"][0]["finish_reason"]

    assert finish("say a") == "stop"
    assert finish("repeat 50 a", max_tokens=3) == "length"
    assert finish("repeat 50 a", max_completion_tokens=3) == "length"
    assert finish("call f {}") == "tool_calls"


def test_an_idle_session_is_asked_until_it_declines(fake_serve):
    server = fake_serve()

    def asked():
        return int(json.loads(server.chat(body("idle"))[2])["choices"][0]["message"]["content"])

    time.sleep(9)
    end = time.monotonic() + 60
    while asked() < 3 and time.monotonic() < end:
        time.sleep(3)
    assert asked() == 3


def test_an_idle_session_is_left_alone_for_a_request_or_the_end(fake_serve):
    """What is written to disk meanwhile may take many seconds; nobody waits for it."""
    server = fake_serve(rest=60)
    time.sleep(2.5)
    began = time.monotonic()
    assert server.chat(body("content now"))[0] == 200
    assert time.monotonic() - began < 30
    idle = fake_serve(rest=60)
    time.sleep(2.5)
    assert idle.stop(seconds=30) == 0


def test_a_file_at_its_limit_does_not_end_the_server(fake_serve):
    """A log or a session on disk: the system's signal is ignored, the write fails."""
    server = fake_serve()
    server.process.send_signal(signal.SIGXFSZ)
    assert server.chat(body("content fine"))[0] == 200


def test_content_without_text(fake):
    message = json.loads(fake.chat(body("call f {}"))[2])["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1
    message = json.loads(fake.chat(body("think hm"))[2])["choices"][0]["message"]
    assert message["content"] == "" and "tool_calls" not in message


def test_line_separators_are_escaped(fake):
    text = "a\u0085b\u2028c\u2029d"
    for stream in (False, True):
        _, _, raw = fake.chat(body(f"say {text}", stream=stream))
        assert "\\u0085" in raw and "\\u2028" in raw and "\\u2029" in raw
        assert not re.search("[\u0085\u2028\u2029]", raw)
    message, _ = joined(events(raw)[0])
    assert message["content"] == text


def test_fields_reach_the_engine(fake):
    def shown(**more):
        return json.loads(json.loads(
            fake.chat(body("show", **more))[2])["choices"][0]["message"]["content"])

    defaults = shown()
    assert defaults["temperature"] == 1.0 and defaults["presence_penalty"] == 1.5
    assert defaults["in_think"] and defaults["random_seed"] and defaults["tools"] is None
    off = shown(chat_template_kwargs={"enable_thinking": False})
    assert off["temperature"] == 0.5 and not off["in_think"]
    assert not shown(reasoning_effort="none")["in_think"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    given = shown(temperature=0, top_p=0.5, top_k=7, min_p=0.25, seed=11, frequency_penalty=0.5,
                  presence_penalty=0.25, repetition_penalty=1.25, logit_bias={"5": -100},
                  stop=["x", "y"], max_tokens=99, tools=[tool], tool_choice="auto")
    assert given["temperature"] == 0 and given["top_p"] == 0.5 and given["top_k"] == 7
    assert given["min_p"] == 0.25 and given["seed"] == 11 and not given["random_seed"]
    assert given["frequency_penalty"] == 0.5 and given["presence_penalty"] == 0.25
    assert given["repetition_penalty"] == 1.25 and given["bias"] == {"5": -100}
    assert given["stops"] == ["x", "y"] and given["max_tokens"] == 99
    assert json.loads(given["tools"]) == [tool]
    assert not given["no_calls"]
    for more in [{}, {"tools": []}, {"tools": [tool], "tool_choice": "none"}]:
        without = shown(**more)  # what looks like a call is then text
        assert without["tools"] is None and without["no_calls"]
    assert shown(stop="x")["stops"] == ["x"]


def test_text_parts_are_accepted(fake):
    parts = [{"type": "text", "text": "say hel"}, {"type": "text", "text": "lo"}]
    _, _, text = fake.chat({"messages": [{"role": "user", "content": parts}]})
    assert json.loads(text)["choices"][0]["message"]["content"] == "hello"


# ---- the other paths ----------------------------------------------------------------------------

def test_models(fake):
    client = fake.client()
    (model,) = client.models.list().data
    assert model.id == "fake" and model.max_model_len == 4096 and model.context_length == 4096
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt")
    assert caught.value.code == "model_not_found"


def test_alias(fake_serve):
    server = fake_serve(alias="my/model")
    assert server.client().models.retrieve("my/model").id == "my/model"
    assert json.loads(server.chat(body("say a"))[2])["model"] == "my/model"


@pytest.mark.parametrize("alias, found", [(b"\xff", "not UTF-8"), (b"a" * 128, "longer")])
def test_an_alias_that_no_client_could_use(fake, alias, found):
    done = subprocess.run([fake.process.args[0], b"alias=" + alias], capture_output=True, timeout=60)
    assert done.returncode == 1 and b"--alias: found" in done.stderr
    assert found in done.stderr.decode()


def test_methods_and_paths(fake):
    for method, path, status in [("GET", "/", 200), ("HEAD", "/health", 200), ("GET", "/x", 404),
                                 ("OPTIONS", "/v1/models", 204), ("POST", "/health", 405),
                                 ("GET", "/v1/chat/completions", 405), ("PUT", "/", 405),
                                 ("DELETE", "/v1/models/fake", 405), ("GET", "/%2e%2e/x", 404)]:
        got, headers, text = fake.get(path, method)
        assert got == status, (method, path)
        assert not [h for h in headers if h.lower().startswith("access-control")]
        if status >= 400:
            error = json.loads(text)["error"]
            assert error["type"] == "invalid_request_error" and error["message"]
        if status == 405:
            assert "GET" in headers["Allow"] or "POST" in headers["Allow"]
        if method == "HEAD":
            assert text == "" and int(headers["Content-Length"]) > 0


def test_connection_is_kept(fake):
    with fake.raw() as raw:
        for _ in range(3):
            raw.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = raw.read_until(b"\r\n\r\n")
            length = int(re.search(rb"Content-Length: (\d+)", head).group(1))
            while len(raw.data) < length:
                raw.data += raw.socket.recv(65536)
            raw.data = raw.data[length:]
        raw.post(body("say one", stream=True))
        raw.read_until(b"[DONE]\n\n")
        raw.read_until(b"0\r\n\r\n")
        raw.post(body("say two"))
        assert b"two" in raw.read_until(b'"two"')


def test_http_1_0_stream_ends_with_the_connection(fake):
    data = json.dumps(body("say one two", stream=True)).encode()
    with fake.raw() as raw:
        raw.send(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(data))
        raw.send(data)
        head, text = raw.read_all().split(b"\r\n\r\n", 1)
    assert b"chunked" not in head.lower()
    message, finish = joined(events(text.decode())[0])
    assert message["content"] == "one two" and finish == "stop"


# ---- errors -------------------------------------------------------------------------------------

def test_bad_requests_name_the_field(fake):
    client = fake.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body("say a"), temperature=9)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    for data, param in [
            (b"", None), (b"{", None), (b"\xff\xfe{}", None), (b"[1]", None), (b"{}", "messages"),
            (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', "messages[0].content"),
            (b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}', None),
            (b'{"messages": ' + b"[" * 100000 + b"]" * 100000 + b"}", None),
            (json.dumps(body("x", n=2)).encode(), "n"),
            (json.dumps(body("x", response_format={"type": "json_object"})).encode(),
             "response_format"),
            (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
             "messages[0].content[0]")]:
        status, _, text = fake.chat(data)
        error = json.loads(text)["error"]
        assert status == 400, data[:80]
        assert set(error) == {"message", "type", "param", "code"}
        if param:
            assert error["param"] == param and param in error["message"]


def test_template_refusal_is_a_400(fake):
    status, _, text = fake.chat(body("reject messages[0].content: found x, expected y"))
    assert status == 400
    assert json.loads(text)["error"]["param"] == "messages[0].content"


def test_what_the_engine_would_refuse_is_refused_before_the_stream(fake):
    for stream in (False, True):
        status, _, text = fake.chat(body("say a", stream=stream, logit_bias={"995": 1}))
        error = json.loads(text)["error"]
        assert status == 400 and error["param"] == "logit_bias" and "995" in error["message"]


def test_engine_errors(fake):
    for code, status in [(-13, 500), (-2, 503), (-12, 503), (-11, 503), (-1, 400), (-3, 500)]:
        got, headers, text = fake.chat(body(f"fail {code} object: what went wrong"))
        assert got == status
        error = json.loads(text)["error"]
        assert error["message"] == "object: what went wrong"
        assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
        assert ("Retry-After" in headers) == (status == 503)
    assert "ok" in fake.chat(body("hello"))[2]


def test_a_failed_run_leaves_what_the_engine_left(fake):
    for code, held in [(-2, True), (-1, True), (-3, True), (-12, False), (-13, False)]:
        script = f"fail {code} object: what went wrong"
        assert fake.chat(body(script))[0] >= 400
        assert fake.health()["session_tokens"] == (len(script) if held else 0)


def test_error_in_a_stream_ends_it_properly(fake):
    script = "say one two\nfail -13 state: found NaN"
    status, _, text = fake.chat(body(script, stream=True))
    chunks, done = events(text)
    assert status == 200 and done
    assert chunks[-1]["error"]["code"] == "engine_failed"
    assert joined(chunks[:-1]) == ({"content": "one two", "reasoning_content": "",
                                    "tool_calls": []}, None)
    seen = ""
    with pytest.raises(openai.APIError, match="found NaN"):
        for chunk in fake.client().chat.completions.create(**body(script), stream=True):
            seen += chunk.choices[0].delta.content or ""
    assert seen == "one two"


def test_context_overflow_is_refused_at_once(fake):
    with fake.raw() as busy:
        busy.post(body("silence 60000", stream=True))
        busy.read_until(b"role")
        for stream in (False, True):
            start = time.monotonic()
            status, _, text = fake.chat(body("x" * 4096, stream=stream))
            assert time.monotonic() - start < SOON
            error = json.loads(text)["error"]
            assert status == 400 and error["code"] == "context_length_exceeded"
            assert error["n_prompt_tokens"] == 4096 and error["n_ctx"] == 4096
            assert "4096" in error["message"]
    fake.wait_idle()
    assert fake.chat(body("x" * 4095))[0] == 200


# ---- busy server --------------------------------------------------------------------------------

def test_health_answers_while_a_request_runs(fake):
    with fake.raw() as raw:
        raw.post(body("prefill 3000 20\nsay x"))
        fake.wait_for(lambda h: h["current"] and h["current"]["prefill_done"] > 2)
        for _ in range(20):
            start = time.monotonic()
            health = fake.health()
            assert time.monotonic() - start < SOON
            assert health["state"] == "busy" and health["running"] == 1
            assert health["current"]["phase"] == "prefill"
            assert health["model"] == "fake" and health["backend"] == "script"
    fake.wait_idle()


PHASES = {  # script, and what health shows when it is time to leave
    "prefill": ("prefill 3000 20\nsay x", lambda h: h["current"]
                and h["current"]["prefill_done"] > 1),
    "decode": ("delay 20\nrepeat 3000 x", lambda h: h["current"]
               and h["current"]["phase"] == "decode"),
    "one long chunk": ("silence 60000", lambda h: h["running"] == 1),
}


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", PHASES)
def test_hang_up_frees_the_engine(fake, phase, stream, how):
    script, reached = PHASES[phase]
    before = fake.health()["totals"]["hang_ups"]
    raw = fake.raw()
    raw.post(body(script, stream=stream))
    fake.wait_for(reached)
    getattr(raw, how)()
    # one chunk or token of 20 ms, the watch's 25 ms, and a shared machine
    assert fake.wait_idle() < SOON
    assert fake.health()["totals"]["hang_ups"] == before + 1
    assert fake.chat(body("say next"))[0] == 200


def test_hang_up_after_five_deltas(fake):
    client = fake.client()
    stream = client.chat.completions.create(**body("delay 20\nrepeat 3000 x"), stream=True)
    for i, _ in enumerate(stream):
        if i == 5:
            break
    stream.close()
    assert fake.wait_idle() < SOON
    line = fake.wait_log(r" 499 .*hang-up in decode.*output=\d+ ")
    assert int(re.search(r"output=(\d+)", line).group(1)) < 500


@pytest.mark.parametrize("stream", [True, False])
def test_hang_up_in_the_queue(fake, stream):
    with fake.raw() as busy:
        busy.post(body("silence 60000"))
        fake.wait_for(lambda h: h["running"] == 1)
        waiting = fake.raw()
        waiting.post(body("say x", stream=stream))
        fake.wait_for(lambda h: h["queued"] == 1)
        waiting.close()
        assert fake.wait_for(lambda h: h["queued"] == 0) < SOON
        assert fake.health()["running"] == 1
    assert fake.wait_idle() < SOON
    fake.wait_for(lambda h: h["held_bytes"] == 0)


def test_hang_up_while_the_prompt_is_rendered(fake):
    raw = fake.raw()
    began = time.monotonic()
    raw.post(body("slow 4000\nsay x"))
    fake.wait_for(lambda h: h["queued"] == 1)
    raw.close()
    fake.wait_for(lambda h: h["queued"] == 0)
    assert time.monotonic() - began < 4  # not only when it is rendered
    assert fake.chat(body("say next"))[0] == 200


def test_half_closed_client_counts_as_gone(fake):
    raw = fake.raw()
    raw.post(body("silence 60000"))
    fake.wait_for(lambda h: h["running"] == 1)
    raw.socket.shutdown(1)
    assert fake.wait_idle() < SOON
    raw.close()


def test_pipelined_request_does_not_hide_a_hang_up(fake):
    raw = fake.raw()
    raw.post(body("silence 60000"))
    raw.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    fake.wait_for(lambda h: h["running"] == 1)
    time.sleep(0.1)
    assert fake.health()["running"] == 1
    raw.close()
    assert fake.wait_idle() < SOON


def test_queue_is_bounded(fake_serve):
    server, raws = fake_serve(queue=2), []
    client = server.client()
    for n in range(3):
        raws.append(server.raw())
        raws[-1].post(body("silence 8000\nsay a b c" if n == 0 else f"say turn{n}"))
        server.wait_for(lambda h: h["running"] + h["queued"] == n + 1 and h["running"] == 1)
    for stream in (False, True):
        status, headers, text = server.chat(body("say x", stream=stream))
        error = json.loads(text)["error"]
        assert status == 503 and error["code"] == "queue_full" and error["type"] == "server_error"
        assert 1 <= int(headers["Retry-After"]) <= 60
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(**body("say x"))
    for n, raw in enumerate(raws):  # the others are not harmed, and come in order
        assert (b"a b c" if n == 0 else b"turn%d" % n) in raw.read_until(b'"usage"')
        raw.close()
    assert server.health()["totals"]["refused"] == 3
    assert server.chat(body("say x"))[0] == 200


def test_client_retries_when_the_queue_is_full(fake_serve):
    server = fake_serve(queue=1)
    answers = []

    def ask():
        reply = server.client(max_retries=5).chat.completions.create(**body("delay 50\nsay a b"))
        answers.append(reply.choices[0].message.content)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert answers == ["a b"] * 4


def test_identical_requests_get_one_answer(fake):
    answers, n = [], 50

    def ask():
        answers.append(json.loads(fake.chat(body(SCRIPT, temperature=0))[2])
                       ["choices"][0]["message"]["content"])

    threads = [threading.Thread(target=ask) for _ in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(answers) == n and len(set(answers)) == 1


# ---- keep-alive ---------------------------------------------------------------------------------

def comments(raw, end):
    """How many came up to end."""
    return raw.read_until(end).count(b": keep-alive\n\n")


@pytest.mark.parametrize("script", ["silence 4600\nsay x", "prefill 46 100\nsay x"])
def test_keep_alive_comments(fake_serve, script):
    server = fake_serve(keepalive=1)
    with server.raw() as first, server.raw() as second:
        start = time.monotonic()
        first.post(body(script, stream=True))
        assert comments(first, b'"role"') == 0
        assert time.monotonic() - start < 4  # headers and the first chunk at once
        server.wait_for(lambda h: h["running"] == 1)
        second.post(body("say y", stream=True))
        assert comments(second, b'"role"') == 0
        assert time.monotonic() - start < 4  # also while it waits for its turn
        for raw in (first, second):
            # one a second, four of which a machine with other work may delay
            assert 2 <= comments(raw, b"[DONE]") <= time.monotonic() - start


def test_no_comments_while_text_flows(fake_serve):
    server = fake_serve(keepalive=3)
    _, _, text = server.chat(body("delay 200\nrepeat 20 x", stream=True))
    assert ": keep-alive" not in text


# ---- shutdown -----------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_shutdown_ends_everything_properly(fake_serve, number):
    server = fake_serve()
    raws = [server.raw() for _ in range(4)]
    raws[0].post(body("delay 20\nrepeat 3000 x", stream=True))
    raws[0].read_until(b'"x"')
    raws[1].post(body("say queued", stream=True))
    raws[1].read_until(b'"role"')
    raws[2].post(body("say queued"))
    server.wait_for(lambda h: h["queued"] == 2)
    start = time.monotonic()
    assert server.stop(number) == 0
    assert time.monotonic() - start < SOON
    for raw in raws[:2]:
        text = raw.read_all()
        assert b'"code":"shutting_down"' in text and b"data: [DONE]\n\n" in text
    text = raws[2].read_all()
    assert b"HTTP/1.1 503" in text and b"Retry-After" in text
    assert raws[3].read_all() == b""
    for raw in raws:
        raw.close()


def test_shutdown_interrupts_a_long_chunk(fake_serve):
    server = fake_serve()
    with server.raw() as raw:
        raw.post(body("silence 60000"))
        server.wait_for(lambda h: h["running"] == 1)
        start = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - start < SOON
        text = raw.read_all()
        assert b"HTTP/1.1 503" in text and b"Retry-After: 1" in text and b"shutting_down" in text


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(fake_serve, second):
    server = fake_serve()
    server.expected = -second
    with server.raw() as raw:
        raw.post(body("slow 60000\nsay x"))  # nothing cancels the rendering of a prompt
        server.wait_for(lambda h: h["queued"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert raw.read_until(b"shutting_down")
        start = time.monotonic()
        assert server.stop(second) == -second
        assert time.monotonic() - start < SOON


def test_port_in_use_is_said(fake_serve):
    server = fake_serve()
    with pytest.raises(AssertionError):
        fake_serve(port=server.port)
    done = subprocess.run([server.process.args[0], f"port={server.port}"], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 1
    assert f"port {server.port}" in done.stderr and "in use" in done.stderr


@pytest.mark.parametrize("host, expected", [
    ("192.0.2.1", "expected an address of this machine; choose another --host"),
    ("nowhere.invalid", 'host "nowhere.invalid": found'), ("", 'host "": found')])
def test_a_wrong_address_is_said(fake_serve, host, expected):
    program = fake_serve().process.args[0]
    quick = {**os.environ, "RES_OPTIONS": "timeout:1 attempts:1"}  # where no name server answers
    done = subprocess.run([program, f"host={host}"], capture_output=True, text=True, timeout=120,
                          env=quick)
    assert done.returncode == 1 and expected in done.stderr


# ---- log ----------------------------------------------------------------------------------------

def test_access_log(fake_serve):
    server = fake_serve()
    server.chat(body("think a\nsay b c", stream=True))
    line = server.wait_log("POST /v1/chat/completions 200")
    assert re.search(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ POST .* stream stop id=chatcmpl-\w+ "
                     r"prompt=15 cached=0 output=3 reasoning=1 queued=", line)
    server.chat(b"{")
    server.wait_log("POST /v1/chat/completions 400 .*invalid_json")
    server.get("/a%0ab%1b[31m")
    server.wait_log(r"GET /a\?b\?\[31m 404")
    quiet = fake_serve(quiet=1)
    quiet.chat(body("say a"))
    quiet.get("/")
    quiet.stop()
    assert quiet.lines == []


def test_a_log_that_nobody_reads_stops_nothing(fake_serve):
    program = fake_serve().process.args[0]
    process = subprocess.Popen([program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        port = int(process.stdout.readline().split()[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for _ in range(600):  # of some 150 bytes each; a pipe holds 64 KiB
            connection.request("GET", "/" + "x" * 200)
            assert connection.getresponse().read()
        connection.request("POST", "/v1/chat/completions", json.dumps(body("say a")))
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0 and log.count("404") > 100
