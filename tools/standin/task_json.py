"""Dialogues that ask for a small JSON object with given fields and values."""

from chat import dump


def scalar(p):
    """(value, how the request writes it)"""
    k = p.n(0, 9)
    if k < 4:
        v = p.one([p.word, p.name, p.city, p.full, p.code, p.date, p.time, lambda: p.phrase(2, 3), lambda: p.one(p.items)])()
        return v, v
    if k < 7:
        v = p.number()
        return v, str(v)
    if k == 7:
        v = p.decimal()
        return v, dump(v)
    if k == 8:
        v = p.chance(0.5)
        return v, dump(v)
    return None, "null"


KEYS = """name age city color size price count active id title author year owner status type level unit total date time
email phone country street room score width height depth weight speed open ready label version file path user group port
host note tag kind model brand start end limit rate""".split()


def key(p):
    if p.chance(0.65):
        return p.one(KEYS)
    return p.word() if p.chance(0.7) else f"{p.word()}_{p.word()}"


def array(p):
    k = p.n(0, 2)
    n = p.n(2, 4)
    if k == 0:
        return [p.number(p.n(1, 3)) for _ in range(n)]
    return [p.one([p.word, p.name, p.city, lambda: p.one(p.items)])() for _ in range(n)]


def join(xs):
    return ", ".join(xs[:-1]) + (" and " if len(xs) > 1 else "") + xs[-1]


def fields(p, keys, deep=True):
    """(object, list of how each field is written)"""
    obj, said = {}, []
    style = p.n(0, 5)
    for k in keys:
        r = p.rng.random()
        if deep and r < 0.10:
            inner, words = fields(p, p.several(lambda: key(p), 1, 3), False)
            obj[k] = inner
            said.append(p.one(["{k}, an object with {w}", "an object {k} with {w}"]).format(k=k, w=join(words)))
        elif deep and r < 0.25:
            obj[k] = array(p)
            body = dump(obj[k])
            said.append(p.one(["{k} as the array {b}", "{k}: {b}", "the list {k} with {c}"]).format(k=k, b=body, c=join([str(x) for x in obj[k]])))
        else:
            v, text = scalar(p)
            obj[k] = v
            if isinstance(v, str) and p.chance(0.4):
                text = f'"{text}"'
            said.append(["{k} {v}", "{k}: {v}", "{k} = {v}", "{k} set to {v}", "the {k} {v}", "{k} is {v}"][style].format(k=k, v=text))
    return obj, said


def build(p):
    keys = p.several(lambda: key(p), 1, 5)
    obj, said = fields(p, keys)
    k = p.n(0, 2)
    if k == 0:
        flat = all(not isinstance(v, (dict, list)) for v in obj.values())
        if flat:
            body = "\n".join(f"{a}: {b if isinstance(b, str) else dump(b)}" for a, b in obj.items())
            q = p.one(["Write this as a JSON object:\n{b}", "Convert these lines to JSON:\n{b}", "{b}\n\nTurn this into a JSON object.", "Make JSON from this:\n{b}"]).format(b=body)
            return q, dump(obj)
    heads = ["Give me a JSON object with {f}.", "Write a JSON object with {f}.", "Return JSON with {f}.", "Create a JSON object with the fields {f}.",
             "I need a JSON object: {f}.", "Please answer with a JSON object that has {f}.", "As JSON: {f}.", "Make a JSON object with {f}."]
    return p.one(heads).format(f=join(said)), dump(obj)


def person(p):
    """Facts from a sentence into named fields."""
    n, a, c, e = p.full() if p.chance(0.5) else p.name(), p.n(5, 99), p.city(), p.email()
    job = p.one("baker teacher nurse pilot farmer painter doctor driver gardener writer singer cook judge sailor tailor".split())
    it, num, price = p.one(p.items), p.n(1, 99), p.decimal()
    forms = [
        (f"{n} is {a} years old and lives in {c}.", {"name": n, "age": a, "city": c}),
        (f"{n} from {c} works as a {job}.", {"name": n, "city": c, "job": job}),
        (f"{n} ({a}) can be reached at {e}.", {"name": n, "age": a, "email": e}),
        (f"{n} bought {num} of the item {it} for {price} each.", {"buyer": n, "count": num, "item": it, "price": price}),
        (f"The {job} {n} is {a}.", {"job": job, "name": n, "age": a}),
        (f"{n} travels to {c} on {(d := p.date())}.", {"name": n, "city": c, "date": d}),
        (f"The meeting with {n} starts at {(t := p.time())} in room {num}.", {"name": n, "time": t, "room": num}),
    ]
    text, obj = p.one(forms)
    items = list(obj.items())
    if p.chance(0.4):
        p.rng.shuffle(items)
    items = items[: p.n(2, len(items))] if p.chance(0.3) else items
    obj = dict(items)
    names = join(list(obj))
    q = p.one(["Extract {k} as JSON: {t}", "{t}\n\nGive me a JSON object with the keys {k}.", "Read this text and return JSON with {k}:\n{t}", "Turn this into JSON with the fields {k}: {t}"])
    return q.format(k=names, t=text), dump(obj)


def listing(p):
    """An array of small objects or of values."""
    if p.chance(0.5):
        xs = array(p)
        return p.one(["Write {x} as a JSON array.", "Give me a JSON array with {x}.", "Make a JSON list of {x}."]).format(x=join([str(x) for x in xs])), dump(xs)
    ks = p.several(lambda: key(p), 2, 2)
    rows = [{ks[0]: p.one([p.word, p.name])(), ks[1]: p.number(p.n(1, 3))} for _ in range(p.n(2, 3))]
    body = "\n".join(f"{r[ks[0]]}, {r[ks[1]]}" for r in rows)
    return p.one(["Turn these lines into a JSON array of objects with the keys {k}:\n{b}", "{b}\n\nWrite this as a JSON array of objects with {k}."]).format(k=join(ks), b=body), dump(rows)


def dialogue(p):
    f = p.rng.choices([build, person, listing], [6, 3, 1])[0]
    q, a = f(p)
    thought = p.one(["I write the fields as JSON.", "A JSON object with these fields."])
    if f is listing:
        thought = "I write a JSON array."
    return {"task": "json", "sub": f.__name__, "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a, "reasoning": thought}]}
