"""Small arithmetic: with a think block that works step by step, or directly when it is easy."""


def add_steps(a, b):
    """Column addition from the right, in words a small model can follow."""
    out, carry, parts = [], 0, []
    x, y = str(a)[::-1], str(b)[::-1]
    for i in range(max(len(x), len(y))):
        d, e = int(x[i]) if i < len(x) else 0, int(y[i]) if i < len(y) else 0
        t = d + e + carry
        parts.append(f"{d} + {e}" + (f" + {carry}" if carry else "") + f" = {t}")
        out.append(str(t % 10))
        carry = t // 10
        parts[-1] += f", write {t % 10}" + (f", carry {carry}" if carry else "")
    if carry:
        parts.append(f"write {carry}")
    return ". ".join(parts) + f". {a} + {b} = {a + b}"


def sub_steps(a, b):
    """Column subtraction from the right, a >= b."""
    borrow, parts = 0, []
    x, y = str(a)[::-1], str(b)[::-1]
    for i in range(len(x)):
        d, e = int(x[i]), int(y[i]) if i < len(y) else 0
        top = d - borrow
        lead = f"{d} - {borrow} = {top}, " if borrow else ""
        borrow = int(top < e)
        t = top + 10 * borrow
        parts.append(f"{lead}{t} - {e} = {t - e}, write {t - e}" + (", borrow 1" if borrow else ""))
    return ". ".join(parts) + f". {a} - {b} = {a - b}"


def mul_steps(a, b):
    """Split the larger factor into its digits' places."""
    a, b = max(a, b), min(a, b)
    if a < 11 or b == 0:
        return f"{a} * {b} = {a * b}"
    tens, ones = a // 10 * 10, a % 10
    if ones == 0:
        return f"{a // 10} * {b} = {a // 10 * b}, {a} * {b} = {a * b}"
    return f"{tens} * {b} = {tens * b}. {ones} * {b} = {ones * b}. {tens * b} + {ones * b} = {a * b}"


def plain(p):
    k = p.n(0, 9)
    if k < 4:
        d = p.n(1, 3)
        a, b = p.number(p.n(1, d)), p.number(p.n(1, d))
        op, r, steps = "+", a + b, add_steps(a, b)
    elif k < 7:
        d = p.n(1, 3)
        a, b = p.number(p.n(1, d)), p.number(p.n(1, d))
        a, b = max(a, b), min(a, b)
        op, r, steps = "-", a - b, sub_steps(a, b)
    else:
        a, b = (p.n(0, 12), p.n(0, 12)) if p.chance(0.5) else (p.n(11, 99), p.n(2, 9))
        if p.chance(0.5):
            a, b = b, a
        op, r, steps = "*", a * b, mul_steps(a, b)
    word = {"+": ["plus", "+"], "-": ["minus", "-"], "*": ["times", "*", "multiplied by", "x"]}[op]
    e = f"{a} {p.one(word + [op] * 2)} {b}"
    if op == "+" and p.chance(0.15):
        q = p.one([f"Add {a} and {b}.", f"What is the sum of {a} and {b}?"])
    elif op == "-" and p.chance(0.15):
        q = p.one([f"Subtract {b} from {a}.", f"What is the difference between {a} and {b}?"])
    elif op == "*" and p.chance(0.15):
        q = p.one([f"Multiply {a} by {b}.", f"What is the product of {a} and {b}?"])
    else:
        q = p.one(["What is {e}?", "Calculate {e}.", "{e} = ?", "How much is {e}?", "Compute {e}.", "{e}", "Please work out {e}."]).format(e=e)
    easy = (op == "*" and a < 11 and b < 11) or (op != "*" and a < 21 and b < 11)
    return q, str(r), steps + ".", easy


def compare(p):
    d = p.n(1, 3)
    a, b = p.several(lambda: p.number(p.n(1, d)), 2, 2)
    big = p.chance(0.6)
    r = max(a, b) if big else min(a, b)
    q = p.one(["Which number is {w}, {a} or {b}?", "Which is {w}: {a} or {b}?", "What is the {w2} of {a} and {b}?"]).format(
        w="larger" if big else "smaller", w2="larger" if big else "smaller", a=a, b=b)
    rel = ">" if a > b else "<"
    return q, str(r), f"{a} {rel} {b}.", True


def story(p):
    """One or two steps about things that people have."""
    n = p.name()
    m = p.name()
    while m == n:
        m = p.name()
    it = p.one(p.items) + "s"
    a, b, c = p.n(2, 60), p.n(2, 40), p.n(2, 20)
    k = p.n(0, 6)
    if k == 0:
        q, steps, r = f"{n} has {a} {it}. {m} gives {n} {b} more. How many {it} does {n} have?", add_steps(a, b), a + b
    elif k == 1:
        a = a + b
        q, steps, r = f"{n} has {a} {it} and loses {b} of them. How many {it} are left?", sub_steps(a, b), a - b
    elif k == 2:
        b, c = p.n(2, 12), p.n(2, 9)
        q, steps, r = f"{n} has {b} boxes with {c} {it} each. How many {it} are there?", mul_steps(b, c), b * c
    elif k == 3:
        q = f"{n} has {a} {it}. {m} has {b} more than {n}. How many do they have together?"
        steps, r = add_steps(a, b) + ". " + add_steps(a, a + b), 2 * a + b
    elif k == 4:
        a = a + b
        q = f"{n} has {a} {it}, gives {b} to {m} and then finds {c}. How many {it} does {n} have now?"
        steps, r = sub_steps(a, b) + ". " + add_steps(a - b, c), a - b + c
    elif k == 5:
        b, c, d = p.n(2, 9), p.n(2, 9), p.n(1, 20)
        q = f"{n} buys {b} bags with {c} {it} each and gets {d} more from {m}. How many {it} does {n} have?"
        steps, r = mul_steps(b, c) + ". " + add_steps(b * c, d), b * c + d
    else:
        q = f"There are {a} {it} on the table and {b} in the box. {n} adds {c} more. How many {it} are there in total?"
        steps, r = add_steps(a, b) + ". " + add_steps(a + b, c), a + b + c
    return q, str(r), steps + ".", False


def dialogue(p, thinking=None):
    f = p.rng.choices([plain, compare, story], [6, 1, 4])[0]
    q, a, steps, easy = f(p)
    thinking = (not easy or p.chance(0.6)) if thinking is None else thinking
    return {"task": "math", "sub": f.__name__, "thinking": thinking, "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a, "reasoning": steps}]}
