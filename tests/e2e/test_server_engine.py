"""`lily serve` with a real checkpoint: the whole way from HTTP to the model and back."""

import json
import random
import threading
import time

import openai
import pytest

from server_fixtures import SOON, Server, events, joined

WORDS = "the river runs past old stone houses where nobody has lived since winter".split()


def words_of(n, seed=0):
    pick = random.Random(seed)
    return " ".join(pick.choice(WORDS) for _ in range(n))


def ask(text, **more):
    return {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 8,
            "temperature": 0, **more}


@pytest.fixture(scope="module")
def server(lily, standin):
    one = Server([lily.path, "serve", "-m", standin, "--port", "0", "--threads", "2",
                  "--keepalive", "1"], r"http://127\.0\.0\.1:(\d+)")
    yield one
    one.end()


@pytest.fixture(scope="module")
def text_of(server):
    """text_of(tokens, seed): text of about so many tokens, whatever the vocabulary."""
    usage = [reply(server, ask(words_of(n)))["usage"]["prompt_tokens"] for n in (1, 101)]

    def make(tokens, seed=0):
        return words_of(int(tokens * 100 / (usage[1] - usage[0])), seed)

    return make


def reply(server, body):
    status, _, text = server.chat(body, timeout=120)
    assert status == 200, text
    return json.loads(text)


def test_streamed_equals_whole_equals_again(server):
    for more in [{}, {"chat_template_kwargs": {"enable_thinking": False}},
                 {"temperature": 1, "seed": 7}]:
        wholes = [reply(server, ask("Tell me a story.", **more)) for _ in range(3)]
        messages = [w["choices"][0]["message"] for w in wholes]
        assert messages[0] == messages[1] == messages[2]
        _, _, text = server.chat(ask("Tell me a story.", stream=True, **more), timeout=120)
        chunks, done = events(text)
        message, finish = joined(chunks)
        assert done and finish == wholes[0]["choices"][0]["finish_reason"]
        assert message["content"] == messages[0]["content"]
        assert message["reasoning_content"] == messages[0].get("reasoning_content", "")


def test_seeds_differ(server):
    def said(**more):
        # A story: the stand-in is too sure of its greetings.
        return json.dumps(reply(server, ask("Tell me a story.", temperature=2, top_p=1, top_k=0,
                                            max_tokens=40, **more))["choices"][0]["message"])

    assert len({said(seed=n) for n in range(5)}) == 5
    assert len({said() for _ in range(5)}) > 1  # no seed: a new one each time


def test_thinking_off_answers_in_content(server):
    off = reply(server, ask("What is 2+2?", chat_template_kwargs={"enable_thinking": False}))
    assert "reasoning_content" not in off["choices"][0]["message"]
    assert off["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert off["choices"][0]["message"]["content"]
    on = reply(server, ask("What is 2+2?"))
    assert on["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_a_begun_answer_is_continued(server):
    body = ask("Count to five.")
    body["messages"].append({"role": "assistant", "content": "One, two,"})
    message = reply(server, body)["choices"][0]["message"]
    assert message["content"] and "reasoning_content" not in message


def test_what_clients_send_is_mended(server):
    tool = {"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"n": {"type": "integer", "maximum": 2**64 - 1}}}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
    messages = [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"},
                {"role": "user", "content": ["a\0b", {"type": "text", "text": "\U0001f600"}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": []},
                {"role": "system", "content": "C"}, {"role": "user", "content": None}]
    status, _, text = server.chat({"messages": messages, "tools": [tool], "max_tokens": 2,
                                   "temperature": 0}, timeout=120)
    assert status == 200, text


def test_usage_and_cache(server, text_of):
    text = text_of(300, 1)
    first = reply(server, ask(text))["usage"]
    second = reply(server, ask(text))["usage"]
    assert first["prompt_tokens"] == second["prompt_tokens"] > 200
    assert second["prompt_tokens_details"]["cached_tokens"] > 0
    assert first["completion_tokens"] == 8


def test_openai_client(server):
    client = server.client(timeout=120)
    (model,) = client.models.list().data
    assert model.max_model_len == server.health()["context_length"]
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather in Paris?"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function",
             "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "15 degrees"}]
    whole = client.chat.completions.create(model="any", messages=messages, tools=tools,
                                           max_tokens=8, temperature=0)
    assert whole.usage.prompt_tokens > 50
    streamed = list(client.chat.completions.create(
        model="any", messages=messages, tools=tools, max_tokens=8, temperature=0, stream=True,
        stream_options={"include_usage": True}))
    assert streamed[-1].usage.total_tokens == whole.usage.total_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        messages[2]["tool_calls"][0]["function"]["arguments"] = "not json"
        client.chat.completions.create(model="any", messages=messages)
    assert caught.value.param.startswith("messages[2]")


def test_identical_requests_get_one_answer(server, text_of):
    answers, n = [], 12

    def one():
        message = reply(server, ask(text_of(70, 2)))["choices"][0]["message"]
        answers.append(json.dumps(message))

    threads = [threading.Thread(target=one) for _ in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert len(answers) == n and len(set(answers)) == 1


def test_interleaved_conversations_do_not_mix(server, text_of):
    prompts = [text_of(150, seed) for seed in range(3)]
    alone = [reply(server, ask(p))["choices"][0]["message"] for p in prompts]
    for order in ([0, 1, 0], [2, 2, 1, 2]):
        for i in order:
            assert reply(server, ask(prompts[i]))["choices"][0]["message"] == alone[i]


def test_context_overflow(server, text_of):
    context = server.health()["context_length"]
    start = time.monotonic()
    status, _, text = server.chat(ask(text_of(context * 1.2)))
    assert time.monotonic() - start < 30  # a minute's reading
    error = json.loads(text)["error"]
    assert status == 400 and error["code"] == "context_length_exceeded"
    assert error["n_ctx"] == context < error["n_prompt_tokens"]


def test_health_and_other_errors_while_a_prompt_is_read(server, text_of):
    with server.raw() as raw:
        raw.post(ask(text_of(20000, 3), stream=True, max_tokens=2))
        server.wait_for(lambda h: h["current"] and h["current"]["phase"] == "prefill")
        for _ in range(5):
            start = time.monotonic()
            assert server.health()["state"] == "busy"
            assert time.monotonic() - start < 3
        start = time.monotonic()
        assert server.chat(ask("x", temperature=9))[0] == 400
        assert time.monotonic() - start < 3
    server.wait_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_hang_up_in_prefill(server, text_of, stream):
    raw, start = server.raw(), time.monotonic()
    raw.post(ask(text_of(20000, 4 + stream), stream=stream))
    server.wait_for(lambda h: h["current"] and h["current"]["prefill_done"] > 0)
    chunk = time.monotonic() - start  # and a little more
    assert server.health()["current"]["phase"] == "prefill"
    raw.close()
    # within one chunk of forty and more, on a machine with other users
    assert server.wait_idle(120) < 2 + 4 * chunk
    server.wait_log("499 .*hang-up in prefill")


@pytest.mark.parametrize("stream", [True, False])
def test_hang_up_in_decode(server, stream):
    raw = server.raw()
    raw.post(ask("Count.", stream=stream, max_tokens=20000, ignore_eos=True))
    server.wait_for(lambda h: h["current"] and h["current"]["phase"] == "decode")
    raw.close()
    assert server.wait_idle() < 5
    server.wait_log("499 .*hang-up in decode")
    assert reply(server, ask("Hi"))["usage"]["completion_tokens"] > 0


def test_long_prefill_keeps_the_connection_alive(server, text_of):
    with server.raw(timeout=120) as raw:
        start = time.monotonic()
        raw.post(ask(text_of(20000, 9), stream=True, max_tokens=2))
        raw.read_until(b'"role"')
        said = time.monotonic()
        assert said - start < SOON
        while b": keep-alive\n\n" not in raw.data and b"[DONE]" not in raw.data:
            raw.data += raw.socket.recv(65536)
        # a comment each second of silence: none only where reading takes hardly longer
        assert b": keep-alive\n\n" in raw.data or time.monotonic() - said < 3
    server.wait_idle()


def test_one_step_ahead(lily, standin):
    """ref samples as a GPU does, the next step in flight while a token is sent. Clients that leave
    then, stop strings and limits change nothing for the next request; a bias puts the host in the
    device's place, with the same text."""
    one = Server([lily.path, "serve", "-m", standin, "--port", "0", "--backend", "ref"],
                 r"http://127\.0\.0\.1:(\d+)")
    for more in [{}, {"temperature": 1, "seed": 3, "top_k": 20}]:
        wanted = ask("Count.", max_tokens=12, ignore_eos=True, **more)
        first = reply(one, wanted)["choices"][0]
        for _ in range(2):
            with one.raw() as raw:
                raw.post(ask("Count.", stream=True, max_tokens=2000, ignore_eos=True, **more))
                raw.read_until(b"_content")  # reasoning has begun
            one.wait_idle(30)
            one.wait_log("499 .*hang-up in decode")
            assert reply(one, wanted)["choices"][0] == first
        for n in (1, 2):
            short = reply(one, {**wanted, "max_tokens": n})
            assert short["usage"]["completion_tokens"] == n
        assert reply(one, {**wanted, "logit_bias": {"0": 0}})["choices"][0] == first
        assert reply(one, wanted)["choices"][0] == first
    one.end()
