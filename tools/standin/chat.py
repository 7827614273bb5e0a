"""Conversations as text: the chat format of the model family, rendered for training.

`render` gives the text of a whole conversation, `pieces` the same text cut into what a user of the
model supplies and what the model must write. Tokenising the pieces one by one gives exactly the
ids seen at generation time, where the prompt is tokenised alone.
"""

import json

TOOLS_HEAD = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
TOOLS_TAIL = """
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within <tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after
- If there is no function call available, answer the question like normal with your current knowledge and do not tell the user about function calls
</IMPORTANT>"""


def dump(value):
    return json.dumps(value, ensure_ascii=False)


def calls_text(content, calls):
    """The tool calls of an assistant turn, with what separates them from its text."""
    out = []
    for i, call in enumerate(calls):
        lead = ("\n\n" if content.strip() else "") if i == 0 else "\n"
        args = "".join(
            f"<parameter={k}>\n{v if isinstance(v, str) else dump(v)}\n</parameter>\n" for k, v in call["arguments"].items()
        )
        out.append(f"{lead}<tool_call>\n<function={call['name']}>\n{args}</function>\n</tool_call>")
    return "".join(out)


def pieces(messages, tools=None, thinking=True, prompt=False):
    """[(text, is the model's own writing)]. Messages are dicts with role, content and, for the
    assistant, optional reasoning and calls. Assistant turns after the last user message carry a
    think block, earlier ones do not. With `prompt`, the text ends where the model starts."""
    out = []

    def put(text, own=False):
        if text and out and out[-1][1] == own:
            out[-1] = (out[-1][0] + text, own)
        elif text:
            out.append((text, own))

    system = messages[0]["content"].strip() if messages[0]["role"] == "system" else None
    if tools:
        lines = "".join("\n" + dump(t) for t in tools)
        put(f"<|im_start|>system\n{TOOLS_HEAD}{lines}{TOOLS_TAIL}" + (f"\n\n{system}" if system else "") + "<|im_end|>\n")
    elif system is not None:
        put(f"<|im_start|>system\n{system}<|im_end|>\n")
    last = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for i, m in enumerate(messages):
        content = (m.get("content") or "").strip()
        if m["role"] == "user":
            put(f"<|im_start|>user\n{content}<|im_end|>\n")
        elif m["role"] == "tool":
            before = messages[i - 1]["role"] if i else ""
            after = messages[i + 1]["role"] if i + 1 < len(messages) else ""
            put("<|im_start|>user" if before != "tool" else "")
            put(f"\n<tool_response>\n{content}\n</tool_response>" + ("<|im_end|>\n" if after != "tool" else ""))
        elif m["role"] == "assistant":
            body = content + calls_text(content, m.get("calls") or [])
            if i < last:
                put(f"<|im_start|>assistant\n{body}<|im_end|>\n")
                continue
            reasoning = (m.get("reasoning") or "").strip()
            if thinking:
                put("<|im_start|>assistant\n<think>\n")
                put(f"{reasoning}\n</think>\n\n{body}<|im_end|>", True)
            else:
                put("<|im_start|>assistant\n<think>\n\n</think>\n\n")
                put(f"{body}<|im_end|>", True)
            put("\n")
    if prompt:
        put("<|im_start|>assistant\n<think>\n" + ("" if thinking else "\n</think>\n\n"))
    return out


def render(messages, tools=None, thinking=True, prompt=False):
    return "".join(t for t, _ in pieces(messages, tools, thinking, prompt))
