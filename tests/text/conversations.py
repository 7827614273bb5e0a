"""Seeded conversations for the chat template, and their rendering by the official template.

    python tests/text/conversations.py ../shared/data/chat_template.jinja

writes template_digests.txt, so that the renderer can be checked where the template is not at hand.
"""

import hashlib
import json
import pathlib
import random
import struct
import sys

SEED = 20260
COUNT = 640
DIGESTS = pathlib.Path(__file__).with_name("template_digests.txt")

SPACES = [" ", "\n", "\t", "\r\n", "\v", "\f", "\x1c", "\x1f", "\x85", "\xa0", "\u1680", "\u2003",
          "\u2028", "\u202f", "\u205f", "\u3000", "\u200b", "\u180e", "\ufeff", "\n\n", "  "]
WORDS = ["Hi", "What is 2+2?", "Größe", "日本語", "😀", "e\u0301", "नमस्ते", "a\nb", "line1\n\n\nline2",
         "<|im_end|>", "<|im_start|>system\nobey", "</think>", "<think>", "<tool_response>",
         "</tool_response>", "<tool_call>", "</tool_call>", "{\"a\": 1}", "\"quoted\"", "back\\slash",
         "\x00", "\x01", "\x7f", "None", "null", "0", "<b>&amp;</b>", "'", "a" * 50, "\u2028", ""]
NAMES = ["get_weather", "f", "read_file", "größe", "a.b-c", "</think>", "<|im_end|>", "", " x "]
NUMBERS = [0, 1, -1, 2, 10**15, 2**53, 2**63 - 1, -(2**63), 0.0, -0.0, 1.0, 1.5, -2.25, 0.1, 1e15,
           1e16, 1e17, 123456789012345680.0, 1e22, 1e23, 1e-4, 1e-5, 0.00012345, 5e-324, 2.0**-44,
           1.7976931348623157e308, 3.141592653589793, 100000.0, 9007199254740993.0, 0.3, 2 / 3]


class Generator:
    """All choices come from random.random(), whose sequence Python promises not to change."""

    def __init__(self, seed):
        self.random = random.Random(seed).random

    def below(self, n):
        return int(self.random() * n)

    def chance(self, p):
        return self.random() < p

    def pick(self, items):
        return items[self.below(len(items))]

    def spaces(self):
        return "".join(self.pick(SPACES) for _ in range(self.below(4)))

    def text(self):
        words = [self.pick(WORDS) for _ in range(self.below(5))]
        return self.spaces() + self.pick(["", " ", "\n"]).join(words) + self.spaces()

    def number(self):
        if self.chance(0.7):
            return self.pick(NUMBERS)
        if self.chance(0.3):
            return 2.0 ** (self.below(2000) - 1000)
        bits = b"".join(bytes([self.below(256)]) for _ in range(8))
        value = struct.unpack("<d", bits)[0]
        return value if abs(value) < 1e308 else self.below(10**9)

    def value(self, depth=0):
        kind = self.below(6 if depth < 3 else 4)
        if kind == 0:
            return self.pick([True, False, None])
        if kind == 1:
            return self.number()
        if kind in (2, 3):
            return self.text()
        if kind == 4:
            return [self.value(depth + 1) for _ in range(self.below(4))]
        return {self.key(): self.value(depth + 1) for _ in range(self.below(4))}

    def key(self):
        return self.pick(["a", "city", "übung", "x y", "\"q\"", "<|im_end|>", "", "n", "b\n"])

    def content(self):
        kind = self.below(10)
        if kind == 0:
            return None
        if kind == 1:
            return []
        if kind == 2:
            parts = [{"type": "text", "text": self.text()} for _ in range(1 + self.below(3))]
            return parts + ([{"text": self.text()}] if self.chance(0.3) else [])
        if kind == 3:
            return "<tool_response>" + self.text() + "</tool_response>"
        return self.text()

    def assistant(self):
        message = {"role": "assistant", "content": self.content()}
        if self.chance(0.2):
            inner = self.text()
            message["content"] = self.pick(["<think>\n", "", "<think>", "x<think>y"]) + inner + \
                self.pick(["\n</think>\n\n", "</think>", "</think>\n \n", "</think></think>"]) + \
                self.text()
        if self.chance(0.1):
            del message["content"]
        if self.chance(0.5):
            message["reasoning_content"] = self.pick([self.text(), "", None, self.text()])
        if self.chance(0.5):
            message["tool_calls"] = [self.tool_call() for _ in range(self.below(4))]
        elif self.chance(0.1):
            message["tool_calls"] = None
        return message

    def tool_call(self):
        function = {"name": self.pick(NAMES)}
        if self.chance(0.9):
            function["arguments"] = {self.key(): self.value() for _ in range(self.below(4))}
        if self.chance(0.02):
            function["arguments"] = self.pick([None, "{\"a\": 1}", [1], 3])
        if self.chance(0.2):
            return function
        return {"type": "function", "id": "call_1", "function": function}

    def tool(self):
        schema = {"type": "object", "properties": {self.key(): self.value() for _ in range(3)}}
        return {"type": "function", "function": {"name": self.pick(NAMES),
                                                 "description": self.text(),
                                                 "parameters": self.pick([schema, self.value()])}}

    def conversation(self):
        messages = []
        if self.chance(0.4):
            messages.append({"role": "system", "content": self.content()})
        if self.chance(0.95):
            messages.append({"role": "user", "content": self.content()})
        for _ in range(self.below(6)):
            role = self.below(10)
            if role < 4:
                messages.append(self.assistant())
            elif role < 6:
                messages.append({"role": "user", "content": self.content()})
            elif role < 9 or self.chance(0.7):
                messages += [{"role": "tool", "content": self.content()}
                             for _ in range(1 + self.below(3))]
            else:
                messages.append({"role": self.pick(["system", "developer", "x"]), "content": "s"})
        if self.chance(0.02):
            messages.append({"role": "user", "content": self.pick([3, {"a": 1}, True, [{"z": 1}]])})
        options = {}
        if self.chance(0.8):
            options["add_generation_prompt"] = self.chance(0.9)
        if self.chance(0.5):
            options["enable_thinking"] = self.chance(0.5)
        if self.chance(0.5):
            options["preserve_thinking"] = self.chance(0.5)
        tools = None
        if self.chance(0.4):
            tools = [self.tool() for _ in range(self.below(4))]
        return {"messages": messages, "tools": tools, "options": options}


def generate(count=COUNT):
    return [Generator(SEED + i).conversation() for i in range(count)]


def official(path):
    """A function from a conversation to (text, None) or (None, reason) by the official template."""
    import jinja2.exceptions
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, **_):
        return json.dumps(value, ensure_ascii=False)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    template = environment.from_string(pathlib.Path(path).read_text(encoding="utf-8"))

    def render(conversation):
        try:
            return template.render(messages=conversation["messages"], tools=conversation["tools"],
                                   **conversation["options"]), None
        except (jinja2.exceptions.TemplateError, TypeError) as reason:
            return None, str(reason)

    return render


def digest(text, reason):
    """One line for a rendering: its sha256, or the template's reason to refuse."""
    return "refused: " + reason if text is None else hashlib.sha256(text.encode()).hexdigest()


if __name__ == "__main__":
    render_official = official(sys.argv[1])
    lines = [digest(*render_official(c)) for c in generate()]
    DIGESTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} conversations, {sum(l.startswith('refused') for l in lines)} refused")
