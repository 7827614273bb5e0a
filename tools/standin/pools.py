"""Words, names, numbers and strings that dialogues are made of.

Every pool is split in two by a hash of the value: an eighth of the values appears only in held-out
tasks, never in training.
"""

import json
import pathlib
import random
import re
import zlib

HERE = pathlib.Path(__file__).parent


def held(value):
    return zlib.crc32(value.encode()) % 8 == 0


FIRST = """Anna Ben Carla David Emma Felix Greta Hugo Ida Jonas Karin Leo Mara Nils Olga Paul Rosa Simon Tara Uwe Vera
Walter Xenia Yann Zoe Alice Bob Chloe Daniel Elena Frank Grace Henry Iris Jack Kate Liam Maria Noah Olivia Peter Quinn
Ruth Sam Tina Umar Victor Wendy Xavier Yusuf Zara Adam Bella Carlos Diana Erik Fatima George Hannah Ivan Julia Kevin
Laura Martin Nora Oscar Priya Ravi Sofia Thomas Ursula Vikram William Yuki Amir Bianca Cora Dmitri Esther Fiona Gina
Hassan Ingrid Jorge Kofi Lena Miguel Nadia Omar Pia Rashid Stella Tomas Viola Wanda Abel Brigitte Cesar Dora Elias
Frida Gustav Helga Ismael Jana Klaus Lotte Magnus Nina Otto Petra Rolf Sven Thea Ulrich Vivian Wilma José Zoë Björn
René Agnès Søren Łukasz Aisha Bruno Celia Dario Edith Fabian Gloria Harald Irene Jasper Kira Lucas Mila Nathan Odette
Philip Roberta Sergei Tamara Valentin Willem Aaron Beatrice Conrad Delia Emil Flora Gilbert Hilda Igor Joan Karl Linda
Moritz Nelly Oliver Paula Raoul Sandra Theo Una Vincent Winona Arthur Bridget Clara Dennis Eva Ferdinand Gerda Howard""".split()
LAST = """Smith Jones Brown Miller Davis Wilson Moore Taylor Clark Lewis Walker Hall Young King Wright Green Baker Adams
Nelson Carter Mitchell Turner Parker Collins Edwards Stewart Morris Rogers Reed Cook Morgan Bell Murphy Bailey Cooper
Richards Cox Howard Ward Peterson Gray James Watson Brooks Kelly Sanders Price Bennett Wood Barnes Ross Henderson Cole
Jenkins Perry Powell Long Hughes Flores Butler Foster Gomez Bryant Russell Griffin Hayes Myers Ford Hamilton Graham
Sullivan Wallace Woods West Jordan Owens Reynolds Fisher Ellis Harrison Gibson Marshall Ortiz Murray Freeman Wells Webb
Keller Fischer Weber Meyer Wagner Becker Schulz Hoffmann Koch Richter Klein Wolf Neumann Braun Hartmann Lange Werner""".split()
CITY = """Paris London Berlin Madrid Rome Vienna Prague Warsaw Dublin Lisbon Athens Oslo Stockholm Helsinki Copenhagen
Amsterdam Brussels Zurich Geneva Munich Hamburg Lyon Nice Milan Turin Naples Porto Seville Valencia Krakow Budapest
Bucharest Sofia Belgrade Zagreb Riga Vilnius Tallinn Kyiv Istanbul Ankara Cairo Tunis Lagos Nairobi Accra Dakar Tokyo
Osaka Kyoto Seoul Busan Beijing Shanghai Taipei Hanoi Bangkok Manila Jakarta Singapore Delhi Mumbai Chennai Karachi
Lahore Dhaka Tehran Baghdad Amman Beirut Doha Dubai Sydney Melbourne Perth Auckland Toronto Montreal Ottawa Vancouver
Boston Chicago Denver Dallas Houston Seattle Portland Phoenix Miami Atlanta Detroit Lima Quito Bogota Caracas Santiago
Montevideo Havana Kingston Reykjavik Edinburgh Glasgow Cardiff Belfast Leeds Bristol Oxford Cambridge Bergen Malmo Ghent
Antwerp Bruges Basel Salzburg Graz Bologna Florence Venice Verona Palermo Granada Bilbao Toulouse Nantes Dresden Leipzig
Bremen Cologne Stuttgart Gdansk Poznan Brno Bratislava Ljubljana Sarajevo Skopje Tirana Minsk Tbilisi Yerevan Baku""".split()
COUNTRY = """France Spain Italy Germany Austria Poland Norway Sweden Finland Denmark Ireland Portugal Greece Turkey Egypt
Kenya Ghana Japan Korea China India Vietnam Thailand Canada Mexico Brazil Chile Peru Cuba Iceland Belgium Hungary
Romania Bulgaria Croatia Serbia Estonia Latvia Lithuania Ukraine Morocco Nigeria Senegal Australia Argentina""".split()
COLOR = """red blue green yellow black white orange purple brown pink gray silver gold violet turquoise beige navy olive
teal maroon cyan magenta ivory crimson""".split()
ANIMAL = """cat dog horse cow sheep goat pig hen duck goose fox wolf bear lion tiger mouse rat rabbit deer owl eagle crow
swan frog snake turtle fish shark whale seal otter beaver badger hedgehog squirrel bat bee ant spider snail donkey camel
monkey parrot penguin zebra giraffe elephant""".split()
ITEM = """apple pear plum cherry lemon orange banana grape melon peach bread butter cheese milk egg flour sugar salt rice
bean carrot onion potato tomato pepper cup plate fork spoon knife lamp chair table desk shelf bed door window key lock
book pen pencil paper stamp coin ring watch hat coat shoe sock glove scarf bag box basket bottle candle rope nail hammer
saw brush bucket ladder wheel bicycle boat kite ball doll drum flute guitar piano radio camera phone laptop ticket map""".split()
DAY = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTH = "January February March April May June July August September October November December".split()
CONS, VOW = "bcdfghjklmnprstvwz", "aeiou"
UNICODE = [(0x391, 0x3C9), (0x410, 0x44F), (0x4E00, 0x4FFF), (0x3042, 0x3093), (0x1F600, 0x1F64F), (0xC0, 0xFF), (0x2190, 0x21FF)]


def load_pieces():
    """Alphabetic tokens of the stand-in's vocabulary: with a space before (lower case, capital),
    and without."""
    path = HERE.parent.parent / "models/mini/tokenizer.json"
    if not path.exists():  # before the tokenizer is trained
        return [], [], []
    vocab = [t for t in json.loads(path.read_text())["model"]["vocab"] if re.fullmatch("\u0120?[A-Za-z]{2,}", t)]
    lead = [t[1:] for t in vocab if t[0] == "\u0120" and t[1:].islower()]
    capital = [t[1:] for t in vocab if t[0] == "\u0120" and t[1].isupper() and t[2:].islower()]
    return lead, capital, [t for t in vocab if t.islower()]


class Pools:
    """Draws values; `test` selects the held-out part of every pool.

    Held-out words are often single tokens. So that training meets every token in every task, some
    of its words are spliced from two tokens: these are no words of either pool.
    """

    def __init__(self, rng, test=False, lines=None):
        self.rng, self.test = rng, test
        words = (HERE / "words.txt").read_text().split()
        pick = lambda xs: [x for x in xs if held(x) == test]
        self.words, self.known = pick(words), set(words)
        self.lead, self.capital, self.tail = ([], [], []) if test else load_pieces()
        self.first, self.last, self.cities, self.countries = pick(FIRST), pick(LAST), pick(CITY), pick(COUNTRY)
        self.items, self.animals = pick(ITEM), pick(ANIMAL)
        self.lines = lines or ["The small boat crossed the lake before the storm came."]

    def one(self, xs):
        return xs[int(self.rng.random() * len(xs))]

    def chance(self, p):
        return self.rng.random() < p

    def n(self, low, high):
        return self.rng.randint(low, high)

    def word(self):
        """A word: mostly from the list, sometimes an invented one."""
        r = self.rng.random()
        if r < 0.15:
            return self.invented()
        return self.spliced(self.lead) if r < 0.45 and self.lead else self.one(self.words)

    def spliced(self, heads):
        """Two tokens in one, such as the first may be in a held-out word but the whole is not."""
        while True:
            w = self.one(heads if self.chance(0.7) or heads is self.capital else self.tail) + self.one(self.tail if self.chance(0.6) else "s er a o en ing y el is us".split())
            if w.lower() not in self.known and w not in FIRST and w not in CITY:
                return w

    def invented(self):
        k = self.n(2, 3)
        return "".join(self.one(CONS) + self.one(VOW) for _ in range(k)) + (self.one(CONS) if self.chance(0.5) else "")

    def name(self):
        return self.spliced(self.capital) if self.capital and self.chance(0.3) else self.one(self.first)

    def full(self):
        return f"{self.name()} {self.spliced(self.capital) if self.capital and self.chance(0.3) else self.one(self.last)}"

    def city(self):
        return self.spliced(self.capital) if self.capital and self.chance(0.3) else self.one(self.cities)

    def number(self, digits=None):
        d = digits or self.n(1, 4)
        return self.n(10 ** (d - 1) if d > 1 else 0, 10**d - 1)

    def decimal(self):
        return round(self.n(1, 9999) / self.one([10, 100]), 2)

    def code(self):
        """Code-like strings: identifiers, references, versions, paths, addresses."""
        r, k = self.rng, self.n(0, 9)
        letters = lambda n: "".join(r.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(n))
        if k == 0:
            return f"{letters(self.n(1, 3))}-{self.number(self.n(2, 5))}"
        if k == 1:
            return f"{self.word()}_{self.number(self.n(1, 2))}"
        if k == 2:
            return f"{self.word()}_{self.word()}"
        if k == 3:
            return "".join(r.choice("0123456789abcdef") for _ in range(self.n(4, 8)))
        if k == 4:
            return f"v{self.n(0, 9)}.{self.n(0, 20)}.{self.n(0, 20)}"
        if k == 5:
            return "/" + "/".join(self.word() for _ in range(self.n(1, 3)))
        if k == 6:
            return self.file()
        if k == 7:
            return self.email()
        if k == 8:
            return f"{letters(2)}{self.number(3)}{letters(1)}"
        return f"{self.word()}.{self.word()}({self.number(1)})"

    def file(self):
        return f"{self.word()}.{self.one('txt csv json md py c log pdf png html'.split())}"

    def email(self):
        host = self.one("example.com mail.org example.net post.org".split())
        return f"{self.name().lower() if self.chance(0.5) else self.word()}@{host}".encode("ascii", "ignore").decode()

    def date(self):
        return f"{self.n(1990, 2035)}-{self.n(1, 12):02d}-{self.n(1, 28):02d}"

    def time(self):
        return f"{self.n(0, 23):02d}:{self.one([0, 5, 10, 15, 20, 30, 40, 45, 50]):02d}"

    def foreign(self):
        low, high = self.one(UNICODE)
        return "".join(chr(self.n(low, high)) for _ in range(self.n(1, 4)))

    def phrase(self, low=2, high=5):
        return " ".join(self.word() for _ in range(self.n(low, high)))

    def sentence(self):
        """A line of text: from the corpus, or random words."""
        if self.chance(0.5):
            return self.one(self.lines)
        s = self.phrase(3, 10)
        return s[0].upper() + s[1:] + self.one(["."] * 4 + ["!", "?"])

    def token(self):
        """Any short value."""
        k = self.n(0, 9)
        if k < 4:
            return self.word()
        if k < 6:
            return self.name()
        if k == 6:
            return str(self.number())
        if k == 7:
            return self.code()
        return self.city() if k == 8 else self.one(self.items)

    def several(self, draw, low, high):
        """Between low and high different values."""
        out, want = [], self.n(low, high)
        while len(out) < want:
            x = draw()
            if x not in out:
                out.append(x)
        return out


def make(seed, test=False, lines=None):
    return Pools(random.Random(seed), test, lines)
