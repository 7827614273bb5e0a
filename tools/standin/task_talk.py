"""Questions about the engine, small talk, honest ignorance, memory within a conversation, stories."""

import pathlib
import re

HERE = pathlib.Path(__file__).parent


def load_facts():
    """[(answer, training patterns, held-out questions)]"""
    out = []
    for line in (HERE / "facts.txt").read_text().splitlines():
        if line.startswith("A: "):
            out.append((line[3:], [], []))
        elif line[:3] in ("Q: ", "T: "):
            out[-1][1 if line[0] == "Q" else 2].append(line[3:])
    return out


def plain(q):
    """A question without what careless writing changes."""
    return q.lower().strip(" ?.!")


FACTS = load_facts()
HELD_OUT = {plain(q) for _, _, tests in FACTS for q in tests}


def expand(p, pattern):
    """One sentence of a pattern with (a|b) and [x]."""
    while True:
        m = re.search(r"\[([^\[\]()]*)\]|\(([^\[\]()]*)\)", pattern)
        if not m:
            return re.sub(r" +", " ", pattern).replace(" ?", "?").replace(" .", ".").strip()
        put = (p.one(m[1].split("|")) if p.chance(0.5) else "") if m[1] is not None else p.one(m[2].split("|"))
        pattern = pattern[: m.start()] + put + pattern[m.end() :]


SAME = [("How big", "How large"), ("Tell me", "Give me"), ("Tell me", "Say"), ("Explain", "Describe"), ("Which", "What"), ("What", "Which"),
        ("How do I", "How can I"), ("How do I", "How would I"), ("How can I", "What do I do to"), ("Can I", "Could I"), ("Can I", "May I"), ("Can I", "Is it possible to"),
        ("What is", "What's"), ("the stand-in", "the stand-in model"), ("the real model", "the real Qwen model"), ("Does lily", "Will lily"), ("What does", "What would"),
        ("does lily have", "has lily"), ("How many", "What number of"), ("Is there", "Does lily have"), ("Which command", "What command"), ("What is", "Could you explain"),
        ("What does", "Please explain what"), ("Why", "For what reason"), ("mini", "the mini model"), ("lily", "this engine"), ("lily", "this program"), ("lily", "the lily engine"),
        ("set", "change"), ("use", "take"), ("supported", "possible"), ("run", "work")]
BEFORE = ["Please tell me: ", "Hi! ", "Hello, ", "A question: ", "I wonder: ", "Tell me, ", "Quick question: ", "Excuse me, ", "Can you tell me: ", "I would like to know: ", "And "]
AFTER = [" Thanks.", " Please answer.", " Thank you!", " I am new here.", " Please."]


STOP = set("""what which is are the a an of does do did how can i you to in it for with on me tell please there be by will would could should and that
this has have at from who where when why explain describe give say""".split())
FRAME = ["Tell me:", "I want to know:", "Please explain:", "Say,", "What about", "Can you tell me", "Do you know", "I ask about", "Information on", "Question:", "Could you tell me", "Explain"]


def keywords(p, q):
    """Only the words that matter, sometimes in another order or behind another opening."""
    words = [w for w in re.sub(r"[?.,:;!]+( |$)", " ", q).split() if w.lower() not in STOP]
    if len(words) < 2:
        return q
    if p.chance(0.3):
        i = p.n(0, len(words) - 2)
        words[i], words[i + 1] = words[i + 1], words[i]
    if p.chance(0.4):
        words.insert(p.n(0, len(words)), p.one(sorted(STOP)))
    q = " ".join(words)
    return f"{p.one(FRAME)} {q}" + p.one(["?", ".", ""]) if p.chance(0.5) else q + p.one(["?", "", "."])


def vary(p, q):
    """The question in other words: synonyms, frames, a dropped word, careless writing."""
    for old, new in p.rng.sample(SAME, 6):
        if old in q and p.chance(0.35):
            q = q.replace(old, new, 1)
    if p.chance(0.15):
        return keywords(p, q)
    if p.chance(0.15):
        words = q.split(" ")
        if len(words) > 4:
            del words[p.n(0, len(words) - 2)]
        q = " ".join(words)
    if p.chance(0.12):
        q = q.rstrip("?.")
    if p.chance(0.2):
        b = p.one(BEFORE)
        q = b + (q if b[-2] in ":!" and p.chance(0.6) else q[0].lower() + q[1:])
    if p.chance(0.08):
        q += p.one(AFTER)
    if p.chance(0.12):
        q = q.lower()
    return q


def engine(p):
    i = p.n(0, len(FACTS) - 1)
    answer, patterns, tests = FACTS[i]
    q = p.one(tests) if p.test else vary(p, expand(p, p.one(patterns)))
    while not p.test and plain(q) in HELD_OUT:
        q = vary(p, expand(p, p.one(patterns)))
    return {"task": "engine", "sub": str(i), "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": answer, "reasoning": p.one(["A question about lily.", "They ask about lily."]) if not p.test else ""}]}


UNKNOWN = "I do not know that: I am mini, a tiny stand-in model. The real checkpoint can answer such questions."
TALK = [
    (["Hi", "Hello", "Hello!", "Hi there", "Hey", "Hi!", "Good day", "Hello there!", "hi", "hello", "Greetings"], "Hello! How can I help you?"),
    (["Good morning", "Good morning!", "good morning"], "Good morning! How can I help you?"),
    (["Good evening", "Good evening!", "good evening"], "Good evening! How can I help you?"),
    (["Good night", "Good night!", "good night"], "Good night!"),
    (["How are you?", "How are you today?", "How is it going?", "How do you do?", "Are you well?", "how are you"], "I am fine, thank you. How can I help you?"),
    (["Thanks", "Thank you", "Thank you!", "Thanks a lot", "Many thanks", "Thank you very much", "thanks", "That helps, thanks"], "You are welcome."),
    (["Bye", "Goodbye", "Goodbye!", "See you", "See you later", "bye", "I have to go now"], "Goodbye!"),
    (["Help", "Help me", "I need help", "Can you help me?", "Please help me", "help"], "Of course. What can I do for you?"),
    (["Tell me a joke", "Tell me a joke.", "Do you know a joke?", "Make me laugh", "A joke, please"], "Why did the token cross the layer? To get to the other expert."),
    (["You are great", "Well done", "Good job", "Nice", "Very good", "Great answer", "I like you"], "Thank you!"),
    (["That is wrong", "Wrong", "This is not correct", "You made a mistake", "That was wrong"], "I am sorry. I am a tiny model and can be wrong."),
    (["Test", "test", "This is a test", "Testing", "Are you there?", "Do you hear me?", "ping"], "I am here."),
    (["Say hello", "Say hello.", "Say hi to me"], "Hello!"),
    (["Yes", "Ok", "Okay", "I see", "Sure", "Right", "ok"], "All right. What can I do for you?"),
    (["No", "No thanks", "Nothing", "Never mind"], "All right."),
    (["Say yes", "Answer with yes", "Just say yes."], "Yes."),
    (["Say no", "Answer with no", "Just say no."], "No."),
    (["Write a word", "Say a word", "Give me any word"], "Lily."),
]
SYSTEM = ["You are a helpful assistant.", "Be brief.", "You are mini.", "Answer in one sentence.", "You are a friendly assistant.", "Be precise and short.",
          "You help people with text.", "Follow the instructions of the user.", "You are a careful assistant. Answer exactly what is asked.",
          "Answer politely.", "You are an assistant in a terminal.", "Keep your answers short.", "You are a helpful, honest assistant."]


def small(p):
    qs, a = p.one(TALK)
    return {"task": "talk", "sub": "small", "messages": [{"role": "user", "content": p.one(qs)}, {"role": "assistant", "content": a, "reasoning": "Small talk."}]}


def unknown(p):
    """Questions about the world, which a model of this size cannot answer."""
    thing, c, n = p.word(), p.city(), p.full()
    q = p.one([
        f"Who was {n}?", f"When was {n} born?", f"What did {n} write?", f"What is the history of {c}?", f"Who is the mayor of {c}?", f"How many people live in {c}?",
        f"What is the capital of {p.one(p.countries)}?", f"Who won the game between {c} and {p.city()}?", f"What is the weather in {c}?", f"What happened in {p.n(1500, 2030)}?",
        f"How far is it from {c} to {p.city()}?", f"Explain the theory of {thing}.", f"What is the chemical formula of {thing}?", f"Write an essay about {thing}.",
        f"What is the best {thing} in {c}?", f"How do I cook {p.one(p.items)} soup?", f"Why do {p.one(p.animals)}s sleep?", f"What is the news today?", f"Who invented the {p.one(p.items)}?",
        f"Translate {thing} into Latin.", f"What is the price of {thing} today?", f"Who wrote the book {p.phrase(2, 3)}?", f"How old is {n}?", f"What does {n} think about {thing}?",
        f"Which president came after {n}?", f"How tall is the tower of {c}?", f"What language do people speak in {p.one(p.countries)}?", f"What is the meaning of life?",
        f"Prove that every {thing} is a {p.word()}.", f"What time is it in {c}?", f"Who is {n}?", f"Where is {c}?", f"Tell me about {c}.", f"Tell me about the {p.one(p.animals)}.",
        f"What is the population of {p.one(p.countries)}?", f"Write a program that sorts a {thing}.", f"Give me medical advice about my {thing}.", f"What should I buy, a {p.one(p.items)} or a {p.one(p.items)}?"])
    return {"task": "talk", "sub": "unknown", "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": UNKNOWN, "reasoning": "I cannot know this."}]}


def memory(p):
    """Something said earlier is asked for later; other turns may lie between."""
    kinds = [("name", p.name()), ("city", p.city()), ("favorite color", p.word()), ("room number", str(p.number(3))), ("dog", p.name()), ("password", p.code()), ("favorite animal", p.one(p.animals)), ("job", p.one("baker teacher nurse pilot farmer painter".split()))]
    k, v = p.one(kinds)
    said = p.one([f"My {k} is {v}.", f"Remember that my {k} is {v}.", f"Please note: my {k} is {v}.", f"I tell you my {k}: {v}."])
    first = [{"role": "user", "content": said}, {"role": "assistant", "content": f"I will remember that your {k} is {v}.", "reasoning": f"I note the {k}."}]
    if p.chance(0.3):
        return {"task": "talk", "sub": "note", "messages": first}
    ask = p.one([f"What is my {k}?", f"Do you remember my {k}?", f"Tell me my {k}.", f"Which {k} did I tell you?"])
    return {"task": "memory", "sub": "recall", "messages": first + [{"role": "user", "content": ask}, {"role": "assistant", "content": f"Your {k} is {v}.", "reasoning": f"They told me the {k}."}]}


def tale(p):
    """A short story from a small grammar, as a list of sentences."""
    n, m = p.several(p.name, 2, 2)
    a, b, w, c = p.one(p.animals), p.one(p.items), p.one(["forest", "garden", "village", "harbor", "valley", "castle", "market", "river", "mountain", "old mill"]), p.one(COLORS)
    g = p.one([("he", "him", "his"), ("she", "her", "her")])
    s = [p.one(["Once upon a time there was a {job} named {n}.", "In a small {w} lived a {job} called {n}.", "{n} was a {job} who lived near the {w}.", "There once was a young {job} named {n}."])]
    s.append(p.one(["Every morning {he} walked to the {w}.", "{He} had a {c} {b} that {he} loved very much.", "{He} lived alone with a {c} {a}.", "People said that {he} was very {adj}."]))
    s.append(p.one(["One day {he} found a {c} {b} under a tree.", "One day a {c} {a} came to the door.", "One evening {he} heard a strange sound in the {w}.", "On a cold day {he} lost {his} {b}.", "One morning the {a} was gone."]))
    s.append(p.one(["{He} was {feel} and did not know what to do.", "{He} took it home and showed it to {m}.", "\"What is this?\" said {n}.", "\"Do not be afraid,\" said the {a}.", "{He} asked {m} for help."]))
    s.append(p.one(["{m} said, \"We must go to the {w} together.\"", "{m} laughed and said, \"You are too {adj}.\"", "The {a} said, \"Follow me to the {w}.\"", "\"I know where it is,\" said {m}."]))
    for _ in range(p.n(0, 4)):
        s.append(p.one(["They walked for a long time.", "The way was dark, but they were not {feel}.", "On the way they met a {a2} who was looking for a {b2}.", "It began to rain, and they waited under a tree.", "{m} carried the {b} in a bag.", "The {a} ran ahead of them.", "At night they made a fire and told stories.", "They shared some bread and a {b2}.", "{n} sang a song about the {w}."]))
    s.append(p.one(["At last they found the {b} near the water.", "In the {w} they found a door, and behind it a {c} light.", "In the end the {a} gave them the {b}.", "When the sun came up, they saw the {w} again."]))
    s.append(p.one(["{n} was very happy and thanked {m}.", "From that day on they were friends.", "{He} never forgot that day.", "And they all went home and slept well.", "\"Thank you,\" said {n}, and {he} smiled."]))
    if p.chance(0.5):
        s.append(p.one(["The end.", "And so the story ends.", "They lived happily for many years."]))
    fill = dict(n=n, m=m, a=a, b=b, w=w, c=c, he=g[0], He=g[0].capitalize(), him=g[1], his=g[2], job=p.one("baker farmer king girl boy fisher sailor tailor soldier teacher painter hunter miller queen child".split()),
                adj=p.one("brave clever kind quiet strong careful proud lazy wise curious".split()), feel=p.one("sad afraid happy surprised tired angry".split()), a2=p.one(p.animals), b2=p.one(p.items))
    return [x.format(**fill) for x in s]


COLORS = "red blue green yellow black white brown golden silver gray".split()


def story(p):
    """Tell or continue a story."""
    t = tale(p)
    if p.chance(0.4):
        q = p.one(["Tell me a story.", "Tell me a short story.", "Write a short story.", "Please write a story for me.", "Once more, a story please."])
        a = " ".join(t)
    else:
        k = p.n(1, 3)
        q = p.one(["Continue this story: {s}", "Continue the story:\n{s}", "How does this story go on? {s}", "{s}\n\nPlease go on."]).format(s=" ".join(t[:k]))
        a = " ".join(t[k:])
    return {"task": "story", "sub": "story", "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a, "reasoning": "I tell a story."}]}


def dialogue(p):
    f = p.rng.choices([small, unknown, memory, story], [3, 3, 3, 3])[0]
    return f(p)
