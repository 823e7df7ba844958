"""What counts as a word in a search: identifiers come apart, inflections fall together, filler is left out.

Compounds are written in three ways ("e-mail", "email", "e mail"). A text that is searched has the parts and the whole
of each that it writes with a hyphen, and of those apart that are commonly written together; a request is then
understood by what the searched texts have (:meth:`~handrail.catalog.search.lexical.Lexical.understood`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

# The English stemmer "Porter2" (Snowball's ``english``): ``schedules``, ``scheduled`` and ``scheduling`` are
# one term.
#
# After M. F. Porter, "The English (Porter2) stemming algorithm", snowballstem.org, without the apostrophe
# rules: words come here without apostrophes. A word of another language mostly stays what it is, which is as
# good.

_EXCEPTIONS = {
    "skis": "ski",
    "skies": "sky",
    "idly": "idl",
    "gently": "gentl",
    "ugly": "ugli",
    "early": "earli",
    "only": "onli",
    "singly": "singl",
    **{word: word for word in ("sky", "news", "howe", "atlas", "cosmos", "bias", "andes")},
}
_UNCHANGED_AFTER_1A = frozenset(("inning", "outing", "canning", "herring", "earring", "evening"))
_REGION = re.compile(r"[aeiouy][^aeiouy]")
_PREFIXES = re.compile(r"gener|commun|arsen|past|univers|later|emerg|organ|inter")
_VOWEL = re.compile(r"[aeiouy]")
_SHORT = re.compile(r"(?:(?:^|.*[^aeiouy])[aeiouy][^aeiouywxY]|^[aeiouy][^aeiouy]|^past)$")
_DOUBLE = ("bb", "dd", "ff", "gg", "mm", "nn", "pp", "rr", "tt")

_STEP_2 = (
    ("ization", "ize"),
    ("ational", "ate"),
    ("fulness", "ful"),
    ("ousness", "ous"),
    ("iveness", "ive"),
    ("tional", "tion"),
    ("biliti", "ble"),
    ("lessli", "less"),
    ("entli", "ent"),
    ("ation", "ate"),
    ("alism", "al"),
    ("aliti", "al"),
    ("ousli", "ous"),
    ("iviti", "ive"),
    ("fulli", "ful"),
    ("ogist", "og"),
    ("enci", "ence"),
    ("anci", "ance"),
    ("abli", "able"),
    ("izer", "ize"),
    ("ator", "ate"),
    ("alli", "al"),
    ("bli", "ble"),
    ("ogi", "og"),
    ("li", ""),
)
_STEP_3 = (
    ("ational", "ate"),
    ("tional", "tion"),
    ("alize", "al"),
    ("icate", "ic"),
    ("iciti", "ic"),
    ("ative", ""),
    ("ical", "ic"),
    ("ness", ""),
    ("ful", ""),
)
_STEP_4 = (
    "ement", "ance", "ence", "able", "ible", "ment", "ant", "ent", "ism", "ate", "iti", "ous", "ive", "ize",
    "ion", "al", "er", "ic",
)  # fmt: skip


@lru_cache(maxsize=65_536)
def stem(word: str) -> str:
    """The stem of a lower-case ``word``."""
    if word in _EXCEPTIONS:
        return _EXCEPTIONS[word]
    if len(word) < 3 or not word.isascii() or not word.isalpha():
        return word
    word = _marked(word)
    first, second = _regions(word)
    word = _step_1a(word)
    if word in _UNCHANGED_AFTER_1A:
        return word
    word = _step_1b(word, first)
    if len(word) > 2 and word[-1] in "yY" and word[-2] not in "aeiouy":
        word = word[:-1] + "i"
    word = _step_2(word, first)
    word = _step_3(word, first, second)
    word = _step_4(word, second)
    return _step_5(word, first, second).lower()


def _marked(word: str) -> str:
    """A y that is a consonant, as Y."""
    if word[0] == "y":
        word = "Y" + word[1:]
    return re.sub(r"(?<=[aeiouy])y", "Y", word)


def _regions(word: str) -> tuple[int, int]:
    """Where R1 and R2 begin: after the first, and after the second, consonant that follows a vowel."""
    prefix = _PREFIXES.match(word)
    if prefix:
        first = prefix.end()
    else:
        found = _REGION.search(word)
        first = found.end() if found else len(word)
    found = _REGION.search(word, first)
    return first, found.end() if found else len(word)


def _step_1a(word: str) -> str:
    if word.endswith("sses"):
        return word[:-2]
    if word.endswith(("ied", "ies")):
        return word[:-2] if len(word) > 4 else word[:-1]
    if word.endswith(("us", "ss")) or not word.endswith("s"):
        return word
    return word[:-1] if _VOWEL.search(word[:-2]) else word


def _step_1b(word: str, first: int) -> str:
    for ending in ("eedly", "eed"):
        if word.endswith(ending):
            if word[: -len(ending)] in ("exc", "proc", "succ"):
                return word
            return word[: -len(ending)] + "ee" if len(word) - len(ending) >= first else word
    for ending in ("ingly", "edly", "ing", "ed"):
        if not word.endswith(ending):
            continue
        rest = word[: -len(ending)]
        if not _VOWEL.search(rest):
            return word
        if ending == "ing" and len(rest) == 2 and rest[1] in "yY":  # dying, lying, tying
            return rest[0] + "ie" if rest[0] not in "aeiouy" else word
        return _mended(rest, first)
    return word


def _mended(rest: str, first: int) -> str:
    """A verb's stem that has lost its ending, as it is without one."""
    if rest.endswith(("at", "bl", "iz")):
        return rest + "e"
    if rest.endswith(_DOUBLE):
        return rest if len(rest) == 3 and rest[0] in "aeo" else rest[:-1]
    return rest + "e" if len(rest) <= first and _SHORT.match(rest) else rest


def _step_2(word: str, first: int) -> str:
    for ending, instead in _STEP_2:
        if word.endswith(ending):
            rest = word[: -len(ending)]
            if len(rest) < first:
                return word
            if (ending == "ogi" and not rest.endswith("l")) or (
                ending == "li" and rest[-1:] not in tuple("cdeghkmnrt")
            ):
                return word
            return rest + instead
    return word


def _step_3(word: str, first: int, second: int) -> str:
    for ending, instead in _STEP_3:
        if word.endswith(ending):
            rest = word[: -len(ending)]
            return rest + instead if len(rest) >= (second if ending == "ative" else first) else word
    return word


def _step_4(word: str, second: int) -> str:
    for ending in _STEP_4:
        if word.endswith(ending):
            rest = word[: -len(ending)]
            taken = len(rest) >= second and (ending != "ion" or rest[-1:] in ("s", "t"))
            return rest if taken else word
    return word


def _step_5(word: str, first: int, second: int) -> str:
    if word.endswith("e"):
        rest = word[:-1]
        return rest if len(rest) >= second or (len(rest) >= first and not _SHORT.match(rest)) else word
    if word.endswith("ll") and len(word) - 1 >= second:
        return word[:-1]
    return word


_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+|[^\W\d_A-Za-z]+")
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]+"
)
_NAME = re.compile(r"[A-Za-z](?:[\w.:/-]{0,126}\w)?")
_JOINED = re.compile(r"[a-z][A-Z]|[_.:/]")
_NAMES = 500
"""Runs of one text that are looked at as names."""
_LONGEST = 40
"""A longer run is no word (a key, base64, a hostile name): only its beginning counts."""

_HYPHENATED = re.compile(
    r"(?<![^\W_])(?<![-\u2010\u2011])([^\W\d_]+)[-\u2010\u2011]([^\W\d_]+)(?![^\W_]|[-\u2010\u2011])"
)
_E_WORD = re.compile(r"(?<![^\W_])([eE])[-\u2010\u2011](?=[a-z]{3})")
_APART: dict[str, frozenset[str]] = {
    first: frozenset(rest.split())
    for first, rest in {
        "e": "mail mails book books commerce learning ticket tickets signature signatures sign invoice invoices card cards",
        "x": "ray rays",
        "wi": "fi",
        "to": "do",
        "check": "out in list lists",
        "log": "in out",
        "sign": "up in",
        "set": "up",
        "back": "up ups end",
        "front": "end",
        "play": "list lists",
        "time": "stamp stamps zone zones out line",
        "web": "site sites page pages hook hooks",
        "home": "page pages",
        "file": "name names",
        "user": "name names",
        "data": "base bases set sets",
        "screen": "shot shots",
        "work": "flow flows space spaces",
        "on": "line",
        "off": "line",
        "spread": "sheet sheets",
        "white": "list",
        "black": "list",
        "health": "care",
        "real": "time",
        "git": "hub lab",
        "you": "tube",
    }.items()
}
"""Words that are written together as often as apart; "to do" counts before what is done with one."""
_PARTICLES = frozenset(["down", "in", "off", "on", "out", "over", "under", "up"])
"""Filler that is part of many a compound."""
MOST_LETTERS = 14
"""Letters of a compound at most."""
_TO_DO = frozenset("app entry item items list lists note notes task tasks".split())  # noqa: SIM905 - as a text it can be read

_RUN = re.compile(r"[^\W_]+")
_LITERALS = frozenset({"false", "none", "null", "true"})

_FILLER = frozenset(
    """a about above after again all also am an and any are as at be because been before being below between both but by
    can cannot could did do does doing down during each else ever few for from further get give had has have having he
    her here hers herself him himself his how i if in into is it its itself just kindly know let like may me might more
    most must my myself need no nor not now of off on once only or other our ours ourselves out over own please same she
    should so some such tell than thank thanks that the their theirs them themselves then there these they this those
    through to too under until up us very want was we were what when where which while who whom whose why will with
    would you your yours yourself yourselves""".split()  # noqa: SIM905 - as a text it can be read
)


def words(text: str) -> list[str]:
    """The words of ``text`` in order, lower-case and without accents; ``getHTTPStatus_v2`` is ``get http status v 2``.

    Writing without blanks (Chinese, Japanese, Thai and their like) gives every two neighbouring characters.
    """
    if not text.isascii():
        text = _plain(text)
    found = _WORD.findall(text)
    if text.isascii():
        return [word.lower()[:_LONGEST] for word in found]
    out: list[str] = []
    for word in found:
        if word.isascii() or not _UNSPACED.match(word):
            out.append(word.lower()[:_LONGEST])
        elif len(word) == 1:
            out.append(word)
        else:
            out.extend(word[at : at + 2] for at in range(len(word) - 1))
    return out


def terms(text: str) -> list[str]:
    """The stems of the words of ``text`` that tell one text from another, in order; after them those of compounds."""
    found = words(text)
    return [term for word in (*found, *compounds(text, found)) if (term := term_of(word))]


def compounds(text: str, found: Sequence[str]) -> list[str]:
    """What ``text`` writes with a hyphen, or apart where others write it together, as one word each.

    :param found: its words
    """
    out: list[str] = []
    if "-" in text or not text.isascii():
        out = [_plain(first + rest).lower()[:_LONGEST] for first, rest in _HYPHENATED.findall(text)]
    hyphenated = frozenset(out)
    for at, word in enumerate(found[:-1]):
        joined = word + found[at + 1]
        done = word != "to" or (at + 2 < len(found) and found[at + 2] in _TO_DO)
        if done and found[at + 1] in _APART.get(word, ()) and joined not in hyphenated:
            out.append(joined)
    return out


def spelled(text: str) -> str:
    """``text`` with "e-mail" and its like in one word, which models know better."""
    return _E_WORD.sub(r"\1", text)


def together(word: str, after: str) -> bool:
    """Whether two neighbouring words of a request may be one that others write together."""
    if not (len(word) > 1 and len(after) > 1 and 4 < len(word) + len(after) <= MOST_LETTERS):
        return False
    return (word not in _FILLER or word in _PARTICLES) and (after not in _FILLER or after in _PARTICLES)


def names_in(text: str) -> list[str]:
    """What ``text`` has, of its first runs, that is written as only names are: ``get_time``, ``getTime``, ``clock.get``.

    It has two words, of which one tells something: no text calls a tool "e.g." or "and/or" by saying so.
    """
    out: list[str] = []
    for found in islice(_NAME.finditer(text), _NAMES):
        if _JOINED.search(found.group()):
            said = [word for word in words(found.group()) if len(word) > 1]
            if len(said) > 1 and not all(filler(word) for word in said):
                out.append(found.group())
    return out


def filler(word: str) -> bool:
    """Whether ``word`` says nothing about what is wanted."""
    return word in _FILLER


def hollow(text: str) -> frozenset[str]:
    """The terms that ``text`` has only as a character, a number or a literal of JSON that stands alone: values, and what
    is left of a pattern. That a tool has one of them too is chance; "s3" and "x509" are names.
    """
    found = _RUN.findall((text if text.isascii() else _plain(text)).lower())
    alone = {
        run for run in found if (len(run) == 1 and not _UNSPACED.match(run)) or run in _LITERALS or run.isdecimal()
    }
    alone -= _FILLER
    return (
        frozenset(alone.difference(words(" ".join(run for run in found if run not in alone)))) if alone else frozenset()
    )


def telling(text: str) -> str:
    """``text`` without its filler; the text itself where nothing is left, or where it is not written in ASCII alone."""
    if not text.isascii():
        return text
    return " ".join(word for word in words(text) if not filler(word)) or text


@lru_cache(maxsize=65_536)
def term_of(word: str) -> str:
    """The stem of ``word``; empty for filler."""
    return "" if word in _FILLER else stem(word)


def _plain(text: str) -> str:
    """Compatibility forms as usual ones (full width, ligatures), letters without accents."""
    decomposed = unicodedata.normalize("NFKD", text)
    bare = "".join(c for c in decomposed if not unicodedata.combining(c) or ord(c) > 0x36F)
    return unicodedata.normalize("NFC", bare)


# A request that holds several needs, cut into its parts: sentences, and clauses that ask for something further.
#
# "Book a table, and then tell me tomorrow's weather" is two needs, and a tool for one of them has little in
# common with the whole. What is quoted is never cut, however many full stops it holds, unless it is the whole
# request.

_VERBS = """add analyze analyse apply arrange assess book build buy calculate call cancel change check choose classify
    close compare compute convert count create decide define delete deploy describe design detect determine display
    download edit estimate evaluate examine execute explain extract fetch figure find fix forecast generate get give
    identify inform install list locate look make measure monitor move notify obtain open optimize order perform plan
    play post predict provide pull purchase read recommend record register remind remove rent reserve retrieve return
    review run schedule search see select send set show simulate solve start stop submit suggest summarize switch tell
    track transfer translate turn update upload use validate verify visualize write""".split()  # noqa: SIM905 - as a text it can be read

_LEADS = (
    r"(?:please|kindly|then|also|finally|lastly|next|additionally|can you|could you|would you|i(?:'d| would| want| need"
    rf"|'m|\s+also)|let me|help me|what|what's|how|when|where|who|which|is there|are there|tell me|{'|'.join(_VERBS)})\b"
)
_SENTENCE = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9¿\x02])|\n+|;\s+|(?<=[?!])\s+|(?<=[。！？；])")
_CLAUSE = re.compile(
    rf",?\s+(?:and|then|plus|after that|as well as)\s*,?\s+(?={_LEADS})|,\s+(?=(?:then|also|finally)\b)", re.IGNORECASE
)
_QUOTED = re.compile(
    r"(?<!\w)\"[^\"]{1,400}\"(?!\w)|(?<!\w)'[^']{1,400}'(?!\w)|“[^”]{1,400}”|```.{1,2000}?```", re.DOTALL
)
_MARKS = {'"': '"', "“": "”"}
_HELD = re.compile("\x02([0-9]+)\x03")
_NO_END = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Inc|St|vs|e\.g|i\.e|etc|No|U\.S|approx)|^\d+)\.$")

MOST_PARTS = 12
"""Parts of one request that are looked for; what comes later is one more with the last."""

_LONGEST_REQUEST = 8_000
"""Characters of a request that are read."""

_SHORTEST = 3
"""Words of a part; a shorter one belongs to the one before."""


def parts(request: str) -> list[str]:
    """The parts of ``request`` in order; the request itself where it is one need."""
    lines = request[:_LONGEST_REQUEST].replace("\x02", " ").replace("\x03", " ").splitlines()
    text = _bare("\n".join(line for each in lines if (line := " ".join(each.split()))))
    held: list[str] = []

    def keep(found: re.Match[str]) -> str:
        held.append(found.group(0))
        return f"\x02{len(held) - 1}\x03"

    out: list[str] = []
    for sentence in _sentences(_QUOTED.sub(keep, text)):
        for clause in _CLAUSE.split(sentence):
            part = _HELD.sub(lambda found: held[int(found.group(1))], clause).strip(" ,.\n\t")
            if len(part.split()) >= _SHORTEST or (part and not part.isascii()):
                out.append(part)
            elif out and part:
                out[-1] = f"{out[-1]} {part}"
    if len(out) > MOST_PARTS:
        out[MOST_PARTS - 1 :] = [" ".join(out[MOST_PARTS - 1 :])]
    return out if len(out) > 1 else [text.strip()]


def _bare(text: str) -> str:
    """``text`` without quotation marks around all of it."""
    while len(text) > 2 and text[0] in _MARKS and text[-1] == _MARKS[text[0]] and text[0] not in text[1:-1]:
        text = text[1:-1].strip()
    return text


def _sentences(text: str) -> list[str]:
    out: list[str] = []
    unfinished: list[str] = []
    for piece in _SENTENCE.split(text):
        unfinished.append(piece)
        if not _NO_END.search(piece[-12:]):
            out.append(" ".join(unfinished))
            unfinished = []
    return [each for each in (*out, " ".join(unfinished)) if each.strip()]
