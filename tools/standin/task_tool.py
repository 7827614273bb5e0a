"""Dialogues in which the model calls a given tool, or several, or none, and uses the result.

Tools are made up on the spot: some from a list of everyday ones with natural requests, the rest
from random verbs, nouns and parameters, so that the model has to read the schema it is given.
"""

from chat import dump

import task_edit
import task_math


class Param:
    """A parameter: its schema, a value and how a request mentions it."""

    def __init__(self, name, schema, draw, said):
        self.name, self.schema, self.draw, self.said = name, schema, draw, said


def lib():
    """The usual parameters: (name, type, description, draw, phrases)."""
    s, i, n, b = "string", "integer", "number", "boolean"
    return [
        ("city", s, "Name of the city", lambda p: p.city(), ["in {v}", "for {v}"]),
        ("country", s, "Name of the country", lambda p: p.one(p.countries), ["in {v}"]),
        ("name", s, "Name of the person", lambda p: p.name(), ["for {v}"]),
        ("recipient", s, "Who receives it", lambda p: p.full(), ["to {v}"]),
        ("email", s, "Email address", lambda p: p.email(), ["to {v}", "using {v}"]),
        ("date", s, "Date as YYYY-MM-DD", lambda p: p.date(), ["on {v}", "for {v}"]),
        ("time", s, "Time as HH:MM", lambda p: p.time(), ["at {v}"]),
        ("path", s, "Path of the file", lambda p: "/" + p.word() + "/" + p.file(), ["at {v}", "from {v}"]),
        ("file", s, "File name", lambda p: p.file(), ["named {v}", "in {v}"]),
        ("id", s, "Identifier", lambda p: p.code(), ["with id {v}"]),
        ("query", s, "What to look for", lambda p: p.phrase(1, 3), ['about "{v}"', 'for "{v}"']),
        ("title", s, "The title", lambda p: p.phrase(1, 4), ['titled "{v}"', 'with the title "{v}"']),
        ("text", s, "The text", lambda p: p.phrase(2, 6), ['with the text "{v}"', 'saying "{v}"']),
        ("item", s, "The thing", lambda p: p.one(p.items), ["of the item {v}", "for {v}"]),
        ("animal", s, "Kind of animal", lambda p: p.one(p.animals), ["for a {v}"]),
        ("color", s, "The color", lambda p: p.word(), ["in the color {v}"]),
        ("days", i, "Number of days", lambda p: p.n(1, 30), ["for {v} days"]),
        ("count", i, "How many", lambda p: p.number(), ["with count {v}", "{v} times"]),
        ("minutes", i, "Minutes", lambda p: p.n(1, 180), ["for {v} minutes", "in {v} minutes"]),
        ("level", i, "Level from 0 to 100", lambda p: p.n(0, 100), ["at level {v}", "with level {v}"]),
        ("room", i, "Room number", lambda p: p.number(3), ["in room {v}"]),
        ("year", i, "The year", lambda p: p.n(1900, 2040), ["in the year {v}"]),
        ("amount", n, "The amount", lambda p: p.decimal() if p.chance(0.6) else p.number(), ["with the amount {v}", "of {v}"]),
        ("price", n, "The price", lambda p: p.decimal(), ["at the price {v}"]),
        ("weight", n, "Weight in kilograms", lambda p: p.decimal(), ["weighing {v} kilograms"]),
        ("urgent", b, "Whether it is urgent", lambda p: p.chance(0.5), ["with urgent {v}"]),
        ("public", b, "Whether everybody can see it", lambda p: p.chance(0.5), ["with public {v}"]),
        ("repeat", b, "Whether to repeat it", lambda p: p.chance(0.5), ["with repeat {v}"]),
        ("tags", "array", "List of tags", lambda p: p.several(p.word, 1, 3), ["with the tags {v}"]),
        ("people", "array", "List of names", lambda p: p.several(p.name, 1, 3), ["with the people {v}"]),
        ("unit", ["celsius", "fahrenheit"], "Unit of the result", None, ["in {v}"]),
        ("priority", ["low", "normal", "high"], "The priority", None, ["with {v} priority"]),
        ("language", ["english", "german", "french", "spanish"], "The language", None, ["in {v}"]),
        ("size", ["small", "medium", "large"], "The size", None, ["in size {v}"]),
        ("mode", ["fast", "exact", "silent"], "The mode", None, ["in {v} mode"]),
    ]


LIB = {x[0]: x for x in lib()}


def param(p, name):
    if name in LIB:
        _, kind, desc, draw, said = LIB[name]
        if isinstance(kind, list):
            options = kind
            return Param(name, {"type": "string", "enum": options, "description": desc}, lambda p: p.one(options), said)
    else:  # an invented parameter
        k, desc = p.n(0, 4), f"The {name.replace('_', ' ')}"
        kind = ["string", "string", "integer", "number", "boolean"][k]
        draw = [lambda p: p.token(), lambda p: p.phrase(1, 3), lambda p: p.number(), lambda p: p.decimal(), lambda p: p.chance(0.5)][k]
        said = [f"with {name.replace('_', ' ')} {{v}}"]
    schema = {"type": kind}
    if kind == "array":
        schema["items"] = {"type": "string"}
    if p.chance(0.8):
        schema["description"] = desc
    return Param(name, schema, draw, said)


def write(v):
    """A value as a request mentions it."""
    if isinstance(v, list):
        return ", ".join(v[:-1]) + (" and " if len(v) > 1 else "") + v[-1]
    return v if isinstance(v, str) else dump(v)


# Everyday tools: name, description, required, optional, natural requests (all required fields),
# fields of the result.
DAILY = [
    ("get_weather", "Get the weather of a city.", ["city"], ["days", "unit"], ["What is the weather in {city}?", "How is the weather in {city}?", "Tell me the weather in {city}.", "Weather in {city}?", "Will it rain in {city}?"], ["temperature", "sky"]),
    ("get_time", "Get the current time in a city.", ["city"], [], ["What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city} now?"], ["time"]),
    ("send_email", "Send an email.", ["email", "text"], ["urgent"], ['Send an email to {email} with the text "{text}".', 'Write to {email}: "{text}".', 'Mail "{text}" to {email}.'], ["status"]),
    ("send_message", "Send a message to a person.", ["recipient", "text"], ["urgent"], ['Tell {recipient} "{text}".', 'Send {recipient} the message "{text}".', 'Message {recipient}: "{text}".'], ["status"]),
    ("set_alarm", "Set an alarm.", ["time"], ["repeat"], ["Wake me up at {time}.", "Set an alarm for {time}.", "I need an alarm at {time}."], ["status", "id"]),
    ("set_timer", "Start a timer.", ["minutes"], [], ["Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "Remind me in {minutes} minutes."], ["status", "id"]),
    ("create_event", "Create an event in the calendar.", ["title", "date"], ["time", "people"], ['Create an event "{title}" on {date}.', 'Put "{title}" into my calendar on {date}.', 'Plan "{title}" for {date}.'], ["id", "status"]),
    ("search_web", "Search the web.", ["query"], ["count", "language"], ['Search the web for "{query}".', 'Look up "{query}" on the web.', 'Find pages about "{query}".'], ["title", "count"]),
    ("search_files", "Search files by their content.", ["query"], ["path"], ['Which files contain "{query}"?', 'Search my files for "{query}".', 'Find "{query}" in my files.'], ["file", "count"]),
    ("read_file", "Read a file.", ["path"], [], ["Read the file {path}.", "Show me {path}.", "What is in {path}?", "Open {path}."], ["text"]),
    ("write_file", "Write text to a file.", ["path", "text"], [], ['Write "{text}" to {path}.', 'Save "{text}" in the file {path}.'], ["status", "size"]),
    ("delete_file", "Delete a file.", ["path"], [], ["Delete {path}.", "Remove the file {path}."], ["status"]),
    ("list_files", "List the files of a folder.", ["path"], ["count"], ["List the files in {path}.", "Which files are in {path}?"], ["count", "file"]),
    ("get_price", "Get the price of an item.", ["item"], [], ["How much does the {item} cost?", "What is the price of the {item}?", "Price of the {item}?"], ["price"]),
    ("buy_item", "Buy an item.", ["item", "count"], ["color", "size"], ["Buy {count} of the item {item}.", "Order {count} of the item {item}.", "I want {count} of the item {item}."], ["total", "status"]),
    ("find_person", "Find a person in the address book.", ["name"], [], ["Find {name} in the address book.", "What is the address of {name}?", "Look up {name}."], ["email", "city"]),
    ("book_room", "Book a room.", ["room", "date"], ["time", "minutes"], ["Book room {room} for {date}.", "Reserve room {room} on {date}."], ["status", "id"]),
    ("book_train", "Book a train ride.", ["city", "date"], ["time"], ["Book a train to {city} on {date}.", "I want to go to {city} by train on {date}."], ["price", "time"]),
    ("play_song", "Play a song.", ["title"], ["level"], ['Play the song "{title}".', 'Play "{title}".', 'I want to hear "{title}".'], ["status"]),
    ("set_volume", "Set the volume.", ["level"], [], ["Set the volume to {level}.", "Turn the volume to {level}.", "Volume {level}, please."], ["status"]),
    ("set_light", "Set the light of a room.", ["room", "level"], ["color"], ["Set the light in room {room} to {level}.", "Dim the light of room {room} to {level}."], ["status"]),
    ("add_note", "Save a note.", ["text"], ["tags"], ['Note: "{text}".', 'Save the note "{text}".', 'Write down "{text}".'], ["id"]),
    ("add_task", "Add a task to the list.", ["title"], ["date", "priority"], ['Add the task "{title}".', 'Put "{title}" on my list.', 'I have to do "{title}", add it to the tasks.'], ["id", "count"]),
    ("translate_text", "Translate a text.", ["text", "language"], [], ['Translate "{text}" into {language}.', 'What is "{text}" in {language}?'], ["text"]),
    ("get_population", "Get the population of a city.", ["city"], ["year"], ["How many people live in {city}?", "What is the population of {city}?"], ["count"]),
    ("get_capital", "Get the capital of a country.", ["country"], [], ["What is the capital of {country}?", "Tell me the capital of {country}."], ["city"]),
    ("track_package", "Find out where a package is.", ["id"], [], ["Where is the package {id}?", "Track the package {id}."], ["city", "status"]),
    ("run_command", "Run a shell command.", ["command"], [], ["Run `{command}`.", "Execute the command `{command}`."], ["output", "code"]),
    ("get_animal", "Get facts about an animal.", ["animal"], [], ["Tell me about the {animal}.", "Give me facts about the {animal}."], ["weight", "years"]),
    ("convert_money", "Convert an amount of money.", ["amount", "from_currency", "to_currency"], [], ["Convert {amount} {from_currency} to {to_currency}.", "How much is {amount} {from_currency} in {to_currency}?"], ["amount"]),
    ("roll_dice", "Roll dice.", ["count"], [], ["Roll {count} dice.", "Throw {count} dice for me."], ["total"]),
    ("calculate", "Calculate an expression.", ["expression"], [], ["Use the calculator for {expression}.", "Calculate {expression} with the tool."], ["result"]),
]
VERB = """get set add find make open close start stop send show list read check move copy count print load save update create
delete search book order plan measure record report watch share lock call fetch build test clean sort""".split()
NOUN = """weather report ticket order invoice contact garden sensor door window engine camera recipe song movie lesson exam
garage parcel bridge market library museum station flight hotel table menu account budget backup server record battery
heater fan pump printer project ticket meeting reminder route map signal channel story photo album letter plant tree field
river boat ship harbor ladder tower castle""".split()
EXTRA = {
    "command": lambda p: p.one(["ls", "cat", "rm", "cp", "grep", "make", "echo", "git"]) + " " + p.one([p.file, p.word])(),
    "from_currency": lambda p: p.one(["USD", "EUR", "GBP", "JPY", "CHF", "SEK", "NOK", "CAD"]),
    "to_currency": lambda p: p.one(["PLN", "CZK", "DKK", "AUD", "INR", "BRL", "MXN", "KRW"]),
    "expression": lambda p: f"{p.number(2)} {p.one('+-*/')} {p.number(2)}",
}


class Tool:
    def __init__(self, name, desc, params, required, requests, result):
        self.name, self.desc, self.params, self.required = name, desc, params, required
        self.requests, self.result = requests, result

    def schema(self):
        props = {q.name: q.schema for q in self.params}
        return {"type": "function", "function": {"name": self.name, "description": self.desc, "parameters": {"type": "object", "properties": props, "required": self.required}}}


def daily(p):
    name, desc, req, opt, requests, result = p.one(DAILY)
    params = []
    for k in req + [o for o in opt if p.chance(0.6)]:
        if k in EXTRA:
            params.append(Param(k, {"type": "string"}, EXTRA[k], ["with {v}"]))
        else:
            params.append(param(p, k))
    return Tool(name, desc, params, list(req), requests, result)


def invented(p):
    """A tool nobody has seen: random verb, noun and parameters."""
    noun = p.one(NOUN) if p.chance(0.6) else p.word()
    verb = p.one(VERB)
    name = p.one([f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.capitalize()}"])
    desc = p.one([f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} a {noun}.", f"Can {verb} the {noun}."])
    names = p.several(lambda: p.one(list(LIB)) if p.chance(0.75) else p.one([p.word(), f"{p.word()}_{p.word()}"]), 1, 4)
    params = [param(p, k) for k in names]
    required = [k for k in names if p.chance(0.75)] or names[:1]
    lead = p.one([f"Please {verb} the {noun}", f"{verb.capitalize()} the {noun}", f"I want to {verb} the {noun}", f"Can you {verb} the {noun}", f"{verb.capitalize()} a {noun}", f"Use {name}", f"Call {name}"])
    return Tool(name, desc, params, required, [lead], p.several(lambda: p.one(["status", "id", "count", "total", "level", "city", "name", p.word()]), 1, 2))


def request(p, tool):
    """(what the user says, the arguments)"""
    values, daily_tool = {}, "{" in tool.requests[0]
    given = [q for q in tool.params if q.name in tool.required or p.chance(0.5)]
    for q in given:
        values[q.name] = q.draw(p)
    extra = [q for q in given if not daily_tool or q.name not in tool.required]
    said = p.one(tool.requests)
    if daily_tool:
        said = said.format(**{k: write(v) for k, v in values.items()})
    end = said[-1] if said[-1] in ".?!" else ("?" if said.startswith("Can you") else ".")
    said = said.rstrip(".?!")
    if extra and not daily_tool and p.chance(0.35):  # name the parameters one by one
        mid = p.one([" with ", ": ", " using "])
        said += mid + p.one([", ", " and "]).join(f"{q.name}{p.one([' ', ' = ', ' '])}{write(values[q.name])}" for q in extra)
    else:
        said += "".join(" " + p.one(q.said).format(v=write(values[q.name])) for q in extra)
    if p.chance(0.15):
        said = p.one(["Please help me: ", "Hello! ", "Hi, ", "One more thing: ", "Quick question: "]) + said
    args = {q.name: values[q.name] for q in tool.params if q.name in values}
    return said + end, args


def result_of(p, tool):
    draws = {
        "temperature": lambda: p.n(-15, 40), "sky": lambda: p.one(["sunny", "cloudy", "rainy", "clear", "windy", "foggy", "stormy"]),
        "time": p.time, "status": lambda: p.one(["ok", "done", "sent", "failed", "waiting", "ready", "saved"]), "id": p.code, "count": p.number,
        "title": lambda: p.phrase(1, 3), "file": p.file, "text": lambda: p.phrase(2, 6), "size": p.number, "price": p.decimal, "total": p.number,
        "email": p.email, "city": p.city, "name": p.name, "output": lambda: p.phrase(1, 3), "code": lambda: p.n(0, 2), "weight": p.decimal,
        "years": lambda: p.n(1, 80), "amount": p.decimal, "result": p.number, "level": lambda: p.n(0, 100),
    }
    return {k: draws.get(k, p.token)() for k in tool.result}


def tell(result):
    """The answer made of a tool's result."""
    said = [f"the {k.replace('_', ' ')} is {write(v)}" for k, v in result.items()]
    text = ", ".join(said[:-1]) + (" and " if len(said) > 1 else "") + said[-1]
    return text[0].upper() + text[1:] + "."


def toolbox(p, low=1, high=5):
    """Different tools, in random order; the first of the answer is the one to use."""
    out, names = [], set()
    want = p.n(low, high)
    while len(out) < want:
        t = daily(p) if p.chance(0.55) else invented(p)
        if t.name not in names:
            names.add(t.name)
            out.append(t)
    return out


def thought(names):
    return f"I call {' and '.join(dict.fromkeys(names))}."


def call(p):
    """One call, or two of the same tool, with or without the answer afterwards."""
    tools = toolbox(p)
    use = p.one(tools)
    said, args = request(p, use)
    calls, uses = [{"name": use.name, "arguments": args}], [use]
    if p.chance(0.12):  # two calls at once
        other = p.one(tools)
        said2, args2 = request(p, other)
        said = said + p.one([" Also: ", " And then: ", " "]) + said2
        calls.append({"name": other.name, "arguments": args2})
        uses.append(other)
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": "", "calls": calls, "reasoning": thought([c["name"] for c in calls])}]
    sub = "call" if len(calls) == 1 else "parallel"
    if p.chance(0.6):
        results = [result_of(p, t) for t in uses]
        if p.chance(0.1) and len(results) == 1:
            error = p.one(["not found", "no permission", "timeout", "unknown " + p.word(), "server error"])
            results = [{"error": error}]
            answer = f"That did not work: {error}."
        else:
            answer = " ".join(tell(r) for r in results)
        messages += [{"role": "tool", "content": dump(r)} for r in results]
        messages.append({"role": "assistant", "content": answer, "reasoning": "I have the result."})
        sub += "+answer"
    return {"task": "tool", "sub": sub, "tools": [t.schema() for t in tools], "messages": messages}


def without(p):
    """Tools are there, but the request needs none of them."""
    tools = toolbox(p, 1, 3)
    d = task_edit.dialogue(p) if p.chance(0.6) else task_math.dialogue(p)
    return {**d, "task": "notool", "tools": [t.schema() for t in tools]}


def missing(p):
    """The request needs a tool that is not there."""
    tools = toolbox(p, 1, 3)
    while True:
        other = daily(p)
        if other.name not in {t.name for t in tools} and other.name.split("_")[-1] not in " ".join(t.name for t in tools):
            break
    said, _ = request(p, other)
    return {"task": "notool", "sub": "missing", "tools": [t.schema() for t in tools],
            "messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "I have no tool for that.", "reasoning": "No tool fits."}]}


def dialogue(p):
    r = p.rng.random()
    return call(p) if r < 0.84 else without(p) if r < 0.94 else missing(p)
