"""Checks of the stand-in's tools that need no training: the chat rendering, the quantiser, the data.

    make test, or: pytest tests/standin     (REFERENCE names the reference folder, when present)
"""

import json
import os
import pathlib
import random
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/standin"))
REFERENCE = pathlib.Path(os.environ.get("REFERENCE", ROOT.parent / "shared"))

import chat  # noqa: E402
import pools  # noqa: E402
import task_edit  # noqa: E402
import task_json  # noqa: E402
import task_math  # noqa: E402
import task_talk  # noqa: E402
import task_tool  # noqa: E402

TASKS = [task_edit.dialogue, task_json.dialogue, task_math.dialogue, task_tool.dialogue, task_talk.engine, task_talk.dialogue]


def conversations(count):
    p = pools.make(4)
    for i in range(count):
        turns = []
        for _ in range(p.n(1, 3)):
            d = TASKS[i % len(TASKS)](p)
            turns += d["messages"]
        if p.chance(0.3):
            turns.insert(0, {"role": "system", "content": p.one(task_talk.SYSTEM)})
        yield turns, d.get("tools")


def test_rendering_equals_the_template():
    path = REFERENCE / "data/chat_template.jinja"
    if not path.exists():
        pytest.skip("the reference folder is not present")
    jinja2 = pytest.importorskip("jinja2")
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda x: json.dumps(x, ensure_ascii=False)
    template = env.from_string(path.read_text())
    for messages, tools in conversations(300):
        given = []
        for m in messages:
            g = {"role": m["role"], "content": m["content"]}
            if m["role"] == "assistant":
                g["reasoning_content"] = m.get("reasoning", "")
                g["tool_calls"] = [{"function": c} for c in m.get("calls", [])]
            given.append(g)
        want = template.render(messages=given, tools=tools)
        assert chat.render(messages, tools, thinking=True) == want
        upto = max(i for i, m in enumerate(messages) if m["role"] != "assistant") + 1
        for thinking in (True, False):
            want = template.render(messages=given[:upto], tools=tools, add_generation_prompt=True, enable_thinking=thinking)
            if all(m["role"] != "assistant" for m in messages[max(i for i, m in enumerate(messages) if m["role"] == "user") : upto]):
                assert chat.render(messages[:upto], tools, thinking, prompt=True) == want


def test_generator_is_repeatable():
    draw = lambda seed: [f(pools.make(seed)) for f in TASKS]
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_held_out_values_never_meet_training():
    a, b = pools.make(1), pools.make(1, test=True)
    for kind in ("words", "first", "last", "cities", "countries", "items", "animals"):
        assert getattr(a, kind) and getattr(b, kind)
        assert not set(getattr(a, kind)) & set(getattr(b, kind))
    assert all(patterns and tests for _, patterns, tests in task_talk.FACTS)
    seen = {task_talk.plain(task_talk.engine(a)["messages"][0]["content"]) for _ in range(20000)}
    assert len(seen) > 5000
    assert not seen & task_talk.HELD_OUT


def test_arithmetic_is_right():
    p = pools.make(9)
    for _ in range(2000):
        a, b = p.number(), p.number()
        assert task_math.add_steps(a, b).endswith(f"= {a + b}")
        assert task_math.sub_steps(max(a, b), min(a, b)).endswith(f"= {abs(a - b)}")
        assert task_math.mul_steps(a % 100, b % 10).endswith(f"= {(a % 100) * (b % 10)}")


def test_quantiser_packs_what_it_rounds():
    torch = pytest.importorskip("torch")
    import quant

    gen = torch.Generator().manual_seed(random.Random(2).randrange(100))
    for bits in (4, 8):
        w = torch.randn(7, 192, generator=gen)
        w[2, :64] = 0  # a group of zeros
        w[3, 64:128] = 0.25  # a constant group
        parts = quant.pack(w, bits)
        assert parts[0].dtype == torch.uint32 and parts[1].dtype == torch.bfloat16
        assert parts[0].shape == (7, 192 * bits // 32) and parts[2].shape == (7, 3)
        assert torch.equal(quant.unpack(*parts, bits), quant.rounded(w, bits))
        assert (parts[1] < 0).any() and (parts[1] > 0).any()
        error = (quant.rounded(w, bits) - w).abs().max().item()
        assert 0 < error < 7.0 / (2**bits - 1)


def test_a_checkpoint_gives_back_what_training_goes_on_from(tmp_path):
    """Checkpoint folder -> bf16 parts, the start of train.py --parts: the stored weights of every tensor."""
    pytest.importorskip("torch")
    import export
    import model
    from safetensors.torch import load_file, save_file

    shape = model.Shape(vocab=128, hidden=64, layers=4, heads=2, head=64, rotary=16, lin=32, experts=4, chosen=2)
    trained = model.initial(shape, 3)
    save_file(export.packed(trained, shape), str(tmp_path / "model.safetensors"))
    export.parts(export.unpacked(tmp_path, shape), tmp_path, limit=1 << 16)
    files = sorted(tmp_path.glob("part*.safetensors"))
    parts = {k: v for f in files for k, v in load_file(str(f)).items()}
    assert len(files) > 1 and set(parts) == set(model.tensors(shape))
    for name, w in export.rounded(trained, shape, True).items():
        assert parts[name].shape == trained[name].shape and (parts[name] == w.bfloat16()).all(), name


def test_training_meets_more_than_the_held_out_tasks():
    """Exercises and emphasis are for training alone: held-out edits are drawn as ever."""
    subs = lambda test: {task_edit.dialogue(p)["sub"] for p in [pools.make(2, test=test)] for _ in range(3000)}
    assert subs(False) - subs(True) == {"spell", "split"}
    p = pools.make(6)
    for _ in range(300):
        d = task_edit.dialogue(p)
        if d["sub"] == "sort_words":
            words = d["messages"][1]["content"].replace(", ", " ").split()
            assert words == sorted(words) and len(set(words)) == len(words) >= 3
