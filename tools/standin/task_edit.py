"""Dialogues about copying and editing text that the user gives.

A task function takes the pools and returns (request, answer, thought). `ask` puts instruction and
text together in one of several ways.
"""


def ask(p, instructions, text, block=False):
    """One request from alternatives of the instruction and the text it is about."""
    how = p.one(instructions)
    if "{t}" in how:
        return how.replace("{t}", text)
    k = p.n(0, 5)
    if k == 0 and "\n" not in text and not block and '"' not in text:
        return f'{how}: "{text}"'
    if k == 1 and "\n" not in text and not block:
        return f"{how}: {text}"
    if k == 2:
        return f"{text}\n\n{how}."
    if k == 3:
        return f"{how}.\n\n{text}"
    return f"{how}:\n{text}"


def copy(p):
    k = p.n(0, 9)
    if k < 4:
        t = p.sentence()
    elif k == 4:
        t = " ".join(p.token() for _ in range(p.n(2, 8)))
    elif k == 5:
        t = "\n".join(p.sentence() for _ in range(p.n(2, 5)))
    elif k == 6:
        t = p.code()
    elif k == 7:
        t = " ".join(p.foreign() if p.chance(0.4) else p.word() for _ in range(p.n(2, 6)))
    elif k == 8:
        t = "\n".join(f"{p.word()}: {p.token()}" for _ in range(p.n(2, 5)))
    else:
        t = ", ".join(p.several(p.token, 3, 8))
    t = t.strip()
    q = ask(p, ["Repeat the following text exactly", "Copy this text", "Repeat this", "Write this text again without changes",
                "Say exactly this", "Repeat after me", "Please copy the text", "Output this text unchanged", "Echo this text"], t)
    return q, t, "I copy the text."


def times(p):
    w, n = p.token(), p.n(2, 5)
    sep, name = p.one([(" ", "separated by spaces"), (", ", "separated by commas"), ("\n", "on separate lines")])
    word = {2: "two times", 3: "three times", 4: "four times", 5: "five times"}[n] if p.chance(0.5) else f"{n} times"
    q = p.one(["Write {w} {n}, {s}.", "Repeat {w} {n}, {s}.", "Say {w} {n}, {s}.", "Please write {w} {n}, {s}."])
    return q.format(w=w, n=word, s=name), sep.join([w] * n), f"I write it {n} times."


def words(p, low, high):
    """Words to change the case of: in training mostly spliced ones, for the spelling of every token."""
    if p.test:
        return p.phrase(low, high)
    return " ".join(p.spliced(p.lead) if p.lead and p.chance(0.4) else p.word() for _ in range(p.n(low, high)))


def upper(p):
    t = words(p, 1, 5)
    return ask(p, ["Write this in uppercase", "Convert this text to uppercase", "Put this in capital letters", "Make this text upper case"], t), t.upper(), "I use capital letters."


def lower(p):
    t = words(p, 1, 5)
    t = p.one([t.upper(), t.title()])
    return ask(p, ["Write this in lowercase", "Convert this text to lowercase", "Put this in small letters", "Make this text lower case"], t), t.lower(), "I use small letters."


def capital(p):
    t = words(p, 2, 5)
    out = " ".join(w[0].upper() + w[1:] for w in t.split())
    return ask(p, ["Capitalize every word", "Start every word with a capital letter", "Capitalise the first letter of each word"], t), out, "I capitalize each word."


def reverse(p):
    xs = p.several(p.token, 3, 6)
    if p.chance(0.5):
        t, out = " ".join(xs), None
        xs = t.split(" ")
        return ask(p, ["Reverse the order of the words", "Write the words in reverse order", "Put these words in the opposite order"], t), " ".join(xs[::-1]), "I start with the last word."
    return ask(p, ["Reverse the order of the lines", "Write these lines in reverse order", "Put the last line first and the first line last, reversing the list"], "\n".join(xs), True), "\n".join(xs[::-1]), "I start with the last line."


def unsorted(p):
    """Words to sort, in training: spliced ones too, and often several with the same first letters."""
    draw = lambda: p.word() if p.chance(0.6) else p.one(p.words + p.items)
    xs, want, alike = [], p.n(3, 5), p.chance(0.3)
    while len(xs) < want:
        x = draw()
        if alike and xs and p.chance(0.7):  # the best of a few by common first letters
            x = max((draw() for _ in range(12)), key=lambda y: common(y, xs[0]))
        if x not in xs:
            xs.append(x)
    p.rng.shuffle(xs)
    return xs


def common(a, b):
    """How many first letters are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def sort_words(p):
    xs = p.several(lambda: p.one(p.words + p.items), 3, 5) if p.test else unsorted(p)
    sep, how = p.one([(" ", "words"), ("\n", "lines"), (", ", "words")])
    return ask(p, [f"Sort these {how} alphabetically", f"Put these {how} in alphabetical order", f"Sort the {how} from a to z"], sep.join(xs), sep == "\n"), sep.join(sorted(xs)), "I sort from a to z."


def sort_numbers(p):
    d = p.n(1, 3)
    xs = p.several(lambda: p.number(p.n(1, d)), 3, 6)
    down = p.chance(0.4)
    sep = p.one([" ", ", ", "\n"])
    hows = ["Sort these numbers from largest to smallest", "Put these numbers in descending order"] if down else ["Sort these numbers", "Sort these numbers from smallest to largest", "Put these numbers in ascending order"]
    return ask(p, hows, sep.join(map(str, xs)), sep == "\n"), sep.join(map(str, sorted(xs, reverse=down))), "The largest comes first." if down else "The smallest comes first."


def replace(p):
    xs = p.several(p.word, 3, 9)
    old = p.one(xs)
    new = p.word()
    while new in xs:
        new = p.word()
    if p.chance(0.3):
        xs.insert(p.n(0, len(xs)), old)
    t = " ".join(xs)
    out = " ".join(new if x == old else x for x in xs)
    hows = [f"Replace {old} with {new}", f'Replace "{old}" with "{new}"', f"Replace the word {old} with {new}", f"Change {old} to {new}", f"Write {new} instead of {old}", f"Swap the word {old} for {new}"]
    return ask(p, [h + p.one([" in this text", " in the text", " in the following text"]) for h in hows], t), out, f"I replace {old} with {new}."


def delete_word(p):
    xs = p.several(p.word, 3, 9)
    old = p.one(xs)
    out = " ".join(x for x in xs if x != old)
    hows = [f"Delete the word {old} from this text", f"Remove {old} from the text", f'Remove the word "{old}" from this text', f"Leave out the word {old}", f"Drop {old} from this text"]
    return ask(p, hows, " ".join(xs)), out, f"I leave out {old}."


def insert_word(p):
    xs = p.several(p.word, 3, 8)
    i, new = p.n(0, len(xs) - 1), p.word()
    after = p.chance(0.5)
    out = xs[: i + after] + [new] + xs[i + after :]
    where = "after" if after else "before"
    hows = [f"Insert {new} {where} {xs[i]}", f"Insert the word {new} {where} {xs[i]}", f'Add "{new}" {where} "{xs[i]}"', f"Put {new} {where} {xs[i]}"]
    if xs.count(xs[i]) > 1 or new in xs:
        return delete_word(p)
    return ask(p, [h + " in this text" for h in hows], " ".join(xs)), " ".join(out), f"I put {new} {where} {xs[i]}."


def swap(p):
    xs = p.several(p.word, 3, 7)
    i, j = sorted(p.rng.sample(range(len(xs)), 2))
    out = list(xs)
    out[i], out[j] = out[j], out[i]
    hows = [f"Swap {xs[i]} and {xs[j]}", f"Exchange the words {xs[i]} and {xs[j]}", f"Swap the words {xs[i]} and {xs[j]}"]
    return ask(p, [h + " in this text" for h in hows], " ".join(xs)), " ".join(out), f"I swap {xs[i]} and {xs[j]}."


ORDINAL = ["first", "second", "third", "fourth", "fifth", "sixth"]


def lines(p):
    """Delete, keep, insert or replace a line."""
    xs = p.several(lambda: p.sentence() if p.chance(0.3) else p.phrase(1, 4), 3, 6)
    i, k = p.n(0, len(xs) - 1), p.n(0, 3)
    which = ORDINAL[i] if p.chance(0.5) or i else "first"
    if i == len(xs) - 1 and p.chance(0.5):
        which = "last"
    line = f"line {i + 1}" if p.chance(0.4) else f"the {which} line"
    new = p.phrase(1, 4)
    if k == 0:
        return ask(p, [f"Delete {line}", f"Remove {line} of this text", f"Leave out {line}"], "\n".join(xs), True), "\n".join(xs[:i] + xs[i + 1 :]), f"I delete {line}."
    if k == 1:
        return ask(p, [f"Write only {line}", f"Give me {line} of this text", f"Keep only {line}", f"Show {line}"], "\n".join(xs), True), xs[i], f"I take {line}."
    if k == 2:
        return ask(p, [f'Insert the line "{new}" after {line}', f'Add "{new}" as a new line after {line}'], "\n".join(xs), True), "\n".join(xs[: i + 1] + [new] + xs[i + 1 :]), f"I add a line after {line}."
    return ask(p, [f'Replace {line} with "{new}"', f'Change {line} to "{new}"'], "\n".join(xs), True), "\n".join(xs[:i] + [new] + xs[i + 1 :]), f"I change {line}."


def word_at(p):
    xs = p.several(p.word, 3, 6)
    i = p.n(0, len(xs) - 1)
    which = "last" if i == len(xs) - 1 else ORDINAL[i]
    return ask(p, [f"Give me the {which} word of this text", f"What is the {which} word of this text", f"Write only the {which} word"], " ".join(xs)), xs[i], f"I take the {which} word."


def layout(p):
    """Between lines, commas, bullets and numbers."""
    xs = p.several(p.token, 2, 6)
    k = p.n(0, 6)
    flat, tall = ", ".join(xs), "\n".join(xs)
    if k == 0:
        return ask(p, ["Write these lines as one line separated by commas", "Join these lines with commas"], tall, True), flat, "I join with commas."
    if k == 1:
        return ask(p, ["Write each item on its own line", "Put every item on a new line", "Split this list into lines"], flat), tall, "One item per line."
    if k == 2:
        return ask(p, ["Make a bullet list of these items", "Turn this into a bullet list", "Write these items as a list with dashes"], flat), "\n".join(f"- {x}" for x in xs), "One dash per item."
    if k == 3:
        return ask(p, ["Number these lines", "Make a numbered list of these lines", "Put a number before each line"], tall, True), "\n".join(f"{i + 1}. {x}" for i, x in enumerate(xs)), "I count the lines."
    if k == 4:
        return ask(p, ["Make a numbered list of these items", "Turn this into a numbered list"], flat), "\n".join(f"{i + 1}. {x}" for i, x in enumerate(xs)), "I count the items."
    if k == 5:
        return ask(p, ["Put quotation marks around each item", "Quote every item"], flat), ", ".join(f'"{x}"' for x in xs), "I quote each item."
    mark = p.one([">", "#", "*", "//", "+", "|"])
    return ask(p, [f"Put {mark} and a space before each line", f"Start every line with {mark} and a space"], tall, True), "\n".join(f"{mark} {x}" for x in xs), f"Each line starts with {mark}."


def wrong_list(p):
    """Repair a list: doubled entries, doubled words, missing numbers, stray spaces."""
    xs = p.several(p.word, 3, 5)
    k = p.n(0, 3)
    if k == 0:
        ys = list(xs)
        ys.insert(p.n(1, len(xs)), p.one(xs))
        sep = p.one([", ", "\n", " "])
        return ask(p, ["Remove the duplicate", "Remove the duplicates from this list", "Write each item only once"], sep.join(ys), sep == "\n"), sep.join(dict.fromkeys(ys)), "I remove what comes twice."
    if k == 1:
        i = p.n(0, len(xs) - 1)
        ys = xs[: i + 1] + [xs[i]] + xs[i + 1 :]
        return ask(p, ["Fix the doubled word", "One word is doubled, fix it", "Remove the repeated word"], " ".join(ys)), " ".join(xs), f"{xs[i]} is doubled."
    good = "\n".join(f"{i + 1}. {x}" for i, x in enumerate(xs))
    if k == 2:
        bad = "\n".join(f"{p.n(1, 9)}. {x}" for x in xs)
        return ask(p, ["Fix the numbers of this list", "The numbering is wrong, fix it", "Number this list correctly"], bad, True), good, "I count from 1."
    bad = "  ".join(xs) if p.chance(0.5) else "   ".join(xs)
    return ask(p, ["Remove the extra spaces", "Fix the spacing", "Use single spaces between the words"], bad, True), " ".join(xs), "I use single spaces."


def field(p):
    """Find one value in given text."""
    k = p.n(0, 4)
    if k < 2:
        keys = p.several(lambda: p.one("name age city color email date time price size owner title status author file phone weight country room level code id version type unit total".split()) if p.chance(0.7) else p.word(), 2, 6)
        vals = [p.phrase(1, 3) if p.chance(0.3) else p.token() for _ in keys]
        i = p.n(0, len(keys) - 1)
        sep = p.one([": ", ": ", " = ", " is "])
        t = p.one(["\n", "\n", "; "]).join(k + sep + v for k, v in zip(keys, vals))
        q = ask(p, [f"What is the {keys[i]}", f"Give me the {keys[i]}", f"Extract the {keys[i]}", f"Write only the value of {keys[i]}"], t, True)
        return q, vals[i], f"I look for {keys[i]}."
    if k == 2:
        e = p.email()
        t = p.one(["Please write to {e} about the {w}.", "The address of {n} is {e}.", "{n} can be reached at {e} until {d}.", "Send the {w} to {e} on {d}."]).format(e=e, w=p.word(), n=p.full(), d=p.one(["Monday", "Friday", "Sunday"]))
        return ask(p, ["Extract the email address", "Which email address is in this text", "Write only the email address"], t), e, "I look for the address."
    if k == 3:
        d = p.date()
        t = p.one(["The {w} starts on {d} in {c}.", "{n} was born on {d}.", "On {d} we meet {n} in {c}.", "The {w} of {n} ends on {d}."]).format(d=d, w=p.word(), n=p.full(), c=p.city())
        return ask(p, ["Extract the date", "Which date is in this text", "Write only the date"], t), d, "I look for the date."
    n = p.number(p.n(1, 4))
    t = p.one(["There are {n} {w} in {c}.", "{a} bought {n} {w}.", "The {w} costs {n} coins.", "Room {n} belongs to {a}."]).format(n=n, w=p.word(), c=p.city(), a=p.name())
    return ask(p, ["Extract the number", "Which number is in this text", "Write only the number"], t), str(n), "I look for the number."


def ends(p):
    """Add text at an end."""
    xs = p.phrase(2, 6)
    w = p.one([p.word(), p.token()])
    k = p.n(0, 2)
    if k == 0:
        return ask(p, [f"Add {w} at the end of this text", f"Put {w} at the end", f"Append {w} to this text"], xs), f"{xs} {w}", f"I add {w} at the end."
    if k == 1:
        return ask(p, [f"Add {w} at the beginning of this text", f"Put {w} at the start", f"Prepend {w} to this text"], xs), f"{w} {xs}", f"I add {w} at the start."
    return ask(p, ["Put this text in quotation marks", "Wrap this in double quotes"], xs, True), f'"{xs}"', "I add quotation marks."


def spell(p):
    """Between words and letters, in training only: exercises the spelling of tokens."""
    x = p.one(p.items + p.cities) if p.chance(0.1) else p.word() if p.chance(0.5) or not p.lead else p.spliced(p.lead)
    x = p.one([x, x, x.upper(), x.capitalize()])
    mark, name = p.one([(" ", "spaces"), ("-", "dashes"), (", ", "commas")])
    if p.chance(0.5):
        return ask(p, [f"Spell this word with {name} between the letters", f"Write the letters of this word separated by {name}"], x), mark.join(x), "I write each letter."
    return ask(p, ["Put these letters together", "Join these letters", "Which word is spelled here"], mark.join(x)), x, "I join the letters."


def split(p):
    """Words on lines of their own, joined by marks and the like, in training only: every token is
    met at the start of a line and after a space."""
    xs = words(p, 2, 6).split(" ")
    forms = [(" ", "by spaces"), ("\n", "by new lines"), (", ", "by commas"), ("-", "by dashes"), ("_", "by underscores"), ("/", "by slashes")]
    (a, _), (b, name) = p.rng.sample(forms, 2)
    how = ["Write each word on its own line", "Put every word on a new line"] if b == "\n" else [f"Separate the words {name}", f"Write these words separated {name}"]
    return ask(p, how, a.join(xs), a == "\n"), b.join(xs), "I separate the words."


# task -> weight in the mixture
TASKS = {copy: 8, times: 2, upper: 3, lower: 3, capital: 2, reverse: 4, sort_words: 4, sort_numbers: 3, replace: 3, delete_word: 2,
         insert_word: 2, swap: 2, lines: 4, word_at: 2, layout: 4, wrong_list: 3, field: 4, ends: 2}
# What a small model learns slowly is drawn more often in training (not in held-out tasks).
SLOW = {sort_words: 3, upper: 2.2, lower: 3, capital: 2, replace: 1.7, times: 1.5, reverse: 1.5, word_at: 1.5, sort_numbers: 2, swap: 2.5,
        insert_word: 2, delete_word: 1.5, lines: 1.2, layout: 1.2}
DRILLS = {spell: 5, split: 6}


def dialogue(p):
    tasks = TASKS if p.test else {**{f: w * SLOW.get(f, 1) for f, w in TASKS.items()}, **DRILLS}
    f = p.rng.choices(list(tasks), list(tasks.values()))[0]
    q, a, thought = f(p)
    return {"task": "edit", "sub": f.__name__, "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a, "reasoning": thought}]}
