"""Build the plain-text corpus from Debian packages with free licences.

    corpus.py OUT.xz [--work DIR]

Downloads the packages below with `apt-get download`, unpacks them, strips markup and writes one
xz file of UTF-8 documents separated by a line that holds a single form feed.
"""

import argparse
import gzip
import html.parser
import lzma
import pathlib
import re
import subprocess

# package -> (licence of the text used, paths inside the package)
PACKAGES = {
    "debian-reference-en": ("GPL-2+", ["usr/share/debian-reference"]),
    "developers-reference": ("GPL-2+", ["usr/share/developers-reference"]),
    "debian-faq": ("GPL-2+", ["usr/share/doc/debian/FAQ"]),
    "debian-policy": ("GPL-2+", ["usr/share/doc/debian-policy"]),
    "maint-guide": ("GPL-2+", ["usr/share/doc/maint-guide"]),
    "python3.11-doc": ("PSF-2", ["usr/share/doc/python3.11/html"]),
    "perl-doc": ("Artistic or GPL-1+", ["usr/share/perl"]),
    "postgresql-doc-15": ("PostgreSQL", ["usr/share/doc/postgresql-doc-15"]),
    "sqlite3-doc": ("public domain", ["usr/share/doc/sqlite3"]),
    "manpages": ("GPL-2+ and verbatim", ["usr/share/man/man7", "usr/share/man/man5"]),
    "dict-jargon": ("public domain", ["usr/share/dictd"]),
    "dict-devil": ("public domain", ["usr/share/dictd"]),
    "dict-foldoc": ("GFDL, no invariants", ["usr/share/dictd"]),
    "wesnoth-1.16-httt": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-low": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-dw": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-utbs": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-ei": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-did": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-nr": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-sof": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-sotbe": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-thot": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-trow": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-tsg": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-ttb": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-dm": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-sota": ("GPL-2+", ["usr/share/games"]),
    "wesnoth-1.16-l": ("GPL-2+", ["usr/share/games"]),
}
# A package's share of the corpus is capped, so that one manual does not crowd out the rest.
CAP_BYTES = 6_000_000


class Stripper(html.parser.HTMLParser):
    """HTML to text: block elements become line breaks, scripts and navigation vanish."""

    BLOCK = {"p", "div", "li", "tr", "h1", "h2", "h3", "h4", "pre", "dt", "dd", "br", "table", "ul"}
    DROP = {"script", "style", "head", "nav", "footer"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.out, self.drop, self.pre = [], 0, 0

    def handle_starttag(self, tag, attrs):
        self.drop += tag in self.DROP
        self.pre += tag == "pre"
        if tag in self.BLOCK:
            self.out.append("\n")

    def handle_endtag(self, tag):
        self.drop -= tag in self.DROP and self.drop > 0
        self.pre -= tag == "pre" and self.pre > 0
        if tag in self.BLOCK:
            self.out.append("\n")

    def handle_data(self, data):
        if not self.drop:
            self.out.append(data if self.pre else re.sub(r"\s+", " ", data))


def from_html(text):
    s = Stripper()
    s.feed(text)
    return "".join(s.out)


def from_man(text):
    text = "\n".join(x for x in text.split("\n") if not x.startswith((".\\\"", "'\\\"")))
    text = re.sub(r"^\.(SH|SS) +\"?(.*?)\"?$", r"\n\2\n", text, flags=re.M)
    text = re.sub(r"^\.(BR?|IR?|RB|RI|BI|IB) +", "", text, flags=re.M)
    text = re.sub(r"^\.[A-Za-z]{1,3}.*$", "", text, flags=re.M)
    text = re.sub(r"\\f.|\\&", "", text).replace("\\-", "-").replace("\\(aq", "'")
    return re.sub(r"\\\(..|\\[|e]", "", text)


def from_pod(text):
    text = re.sub(r"^=(head\d|item|over|back|cut|pod|encoding|for|begin|end) ?(.*)$", r"\2", text, flags=re.M)
    return re.sub(r"[A-Z]<+ ?([^<>]*?) ?>+", r"\1", text)


def from_campaign(text):
    """The spoken lines and narration of a game campaign, in order, as a story."""
    lines = []
    for who, said in re.findall(r"speaker=(\S+).*?message= *_ *\"((?:[^\"]|\"\")*)\"", text, flags=re.S):
        said = re.sub(r"\s+", " ", said.replace('""', '"')).strip()
        lines.append(said if who in ("narrator", '"narrator"') else f'{who.strip(chr(34))}: "{said}"')
    lines += [re.sub(r"\s+", " ", s).strip() for s in re.findall(r"story= *_ *\"([^\"]*)\"", text)]
    return re.sub(r"</?[a-z][^>]*>", "", "\n".join(lines))


def tidy(text):
    text = text.replace("\r", "").replace("\f", "\n").replace("\u00a0", " ")
    text = re.sub(r"[^\S\n]+\n", "\n", text)
    text = re.sub(r"[^\S\n]{5,}", "    ", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def read(path):
    raw = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        raw = gzip.decompress(raw)
    return raw.decode("utf-8", "replace")


def documents(root, package):
    for path in sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink()):
        name = path.name.removesuffix(".gz")
        if re.search(r"changelog|copyright|genindex|searchindex|NEWS|index-", name, re.I):
            continue
        if package.startswith("dict-") and path.name.endswith(".dict.dz"):
            entries = re.split(r"\n(?=\S)", read(path))
            for i in range(0, len(entries), 12):
                yield "\n".join(entries[i : i + 12])
        elif name.endswith((".html", ".htm")):
            yield from_html(read(path))
        elif name.endswith(".pod"):
            yield from_pod(read(path))
        elif re.search(r"\.[57]$", name):
            yield from_man(read(path))
        elif name.endswith(".cfg"):
            yield from_campaign(read(path))
        elif name.endswith(".txt"):
            yield read(path)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("out")
    ap.add_argument("--work", default="/tmp/standin-corpus")
    args = ap.parse_args()
    work = pathlib.Path(args.work)
    work.mkdir(parents=True, exist_ok=True)
    total = 0
    with lzma.open(args.out, "wt", encoding="utf-8", preset=6) as f:
        for package, (licence, roots) in PACKAGES.items():
            tree = work / package
            if not tree.exists():
                got = subprocess.run(["apt-get", "download", "-q", package], cwd=work, capture_output=True)
                debs = sorted(work.glob(f"{package}_*.deb"))
                if got.returncode or not debs:
                    print(f"{package}: not available, skipped")
                    continue
                subprocess.run(["dpkg-deb", "-x", str(debs[-1]), str(tree)], check=True)
            size = 0
            for r in roots:
                for text in documents(tree / r, package):
                    text = tidy(text)
                    if len(text) < 200 or text.count("\ufffd") > 3:
                        continue
                    f.write(text + "\n\f\n")
                    size += len(text)
                    if size > CAP_BYTES:
                        break
            total += size
            print(f"{package:24s} {licence:22s} {size:10,d} characters")
    print(f"total {total:,d} characters")


if __name__ == "__main__":
    main()
