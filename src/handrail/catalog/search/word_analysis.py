"""The words of a search: identifiers are split, inflections merged, filler removed, requests cut into their parts.

Compounds are written in three ways ("e-mail", "email", "e mail"). A searched text has the parts and the whole of each
hyphenated compound, and of separate words that are commonly joined. A request is then mapped to the terms of the searched
texts (:meth:`~handrail.catalog.search.lexical_index.LexicalIndex.extract_request_terms`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+|[^\W\d_A-Za-z]+")
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]+"
)
_NAME = re.compile(r"[A-Za-z](?:[\w.:/-]{0,126}\w)?")
_JOINED = re.compile(r"[a-z][A-Z]|[_.:/]")
_NAMES = 500
"""The maximum number of runs of one text that are checked as names."""
_LONGEST = 40
"""The maximum length of a word. A longer run is a key, base64 or a hostile name, and only its beginning counts."""

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
"""Words that are written together as often as apart. "to do" counts only before a word of ``_TO_DO``."""
_PARTICLES = frozenset(["down", "in", "off", "on", "out", "over", "under", "up"])
"""Filler words that are part of many compounds."""
MAX_COMPOUND_LETTERS = 14
"""The maximum letters of a compound."""
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


def split_words(text: str) -> list[str]:
    """Return the words of ``text`` in order, lower-case and without accents.

    ``getHTTPStatus_v2`` becomes ``get http status v 2``. Writing without spaces (Chinese, Japanese, Thai and similar) becomes
    overlapping pairs of characters.
    """
    if not text.isascii():
        text = _to_plain_letters(text)
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


def extract_stemmed_terms(text: str) -> list[str]:
    """Return the stems of the telling words of ``text``, in order, followed by those of compounds."""
    found = split_words(text)
    return [term for word in (*found, *extract_compound_words(text, found)) if (term := stem_unless_filler(word))]


def extract_compound_words(text: str, found: Sequence[str]) -> list[str]:
    """Return the compounds of ``text``, each as one word.

    They are written with a hyphen, or as separate words that others join.

    :param found: the words of ``text``
    """
    out: list[str] = []
    if "-" in text or not text.isascii():
        out = [_to_plain_letters(first + rest).lower()[:_LONGEST] for first, rest in _HYPHENATED.findall(text)]
    hyphenated = frozenset(out)
    for at, word in enumerate(found[:-1]):
        joined = word + found[at + 1]
        done = word != "to" or (at + 2 < len(found) and found[at + 2] in _TO_DO)
        if done and found[at + 1] in _APART.get(word, ()) and joined not in hyphenated:
            out.append(joined)
    return out


def join_e_mail_words(text: str) -> str:
    """Return ``text`` with "e-mail" and similar words as one word, which models know better."""
    return _E_WORD.sub(r"\1", text)


def may_be_compound(word: str, after: str) -> bool:
    """Return whether two adjacent words of a request may be a compound."""
    if not (len(word) > 1 and len(after) > 1 and 4 < len(word) + len(after) <= MAX_COMPOUND_LETTERS):
        return False
    return (word not in _FILLER or word in _PARTICLES) and (after not in _FILLER or after in _PARTICLES)


def extract_identifier_like_words(text: str) -> list[str]:
    """Return the parts of ``text`` that are spelled as only names are: ``get_time``, ``clock.get``.

    A name has two words, one of them telling, so that "e.g." or "and/or" are not names. Only the first runs of a long text count.
    """
    out: list[str] = []
    for found in islice(_NAME.finditer(text), _NAMES):
        if _JOINED.search(found.group()):
            items = [word for word in split_words(found.group()) if len(word) > 1]
            if len(items) > 1 and not all(is_filler_word(word) for word in items):
                out.append(found.group())
    return out


def is_filler_word(word: str) -> bool:
    """Return whether ``word`` tells nothing about the need."""
    return word in _FILLER


def find_uninformative_terms(text: str) -> frozenset[str]:
    """Return the terms of ``text`` that occur only as a single character, a number or a JSON literal.

    They are values, and remains of a pattern. A tool has one of them by chance. But "s3" and "x509" are names.
    """
    found = _RUN.findall((text if text.isascii() else _to_plain_letters(text)).lower())
    alone = {
        run for run in found if (len(run) == 1 and not _UNSPACED.match(run)) or run in _LITERALS or run.isdecimal()
    }
    alone -= _FILLER
    return (
        frozenset(alone.difference(split_words(" ".join(run for run in found if run not in alone))))
        if alone
        else frozenset()
    )


def remove_filler_words(text: str) -> str:
    """Return ``text`` without its filler words.

    The text stays unchanged if nothing would be left, or if it is not ASCII.
    """
    if not text.isascii():
        return text
    return " ".join(word for word in split_words(text) if not is_filler_word(word)) or text


@lru_cache(maxsize=65_536)
def stem_word(word: str) -> str:
    """Return the stem of a lower-case English word, by Snowball's ``english``; any other word unchanged.

    ``schedules``, ``scheduled`` and ``scheduling`` are one term.
    """
    if not word.isascii() or not word.isalpha():
        return word
    from snowballstemmer.english_stemmer import EnglishStemmer  # loads every language, and most calls search nothing

    stemmer: Any = EnglishStemmer()  # keeps the word that it works on, so that no two threads may share one
    return stemmer.stemWord(word)


@lru_cache(maxsize=65_536)
def stem_unless_filler(word: str) -> str:
    """Return the stem of ``word``; empty for filler."""
    return "" if word in _FILLER else stem_word(word)


def _to_plain_letters(text: str) -> str:
    """Replace compatibility forms (full width, ligatures) by usual ones, and remove accents."""
    decomposed = unicodedata.normalize("NFKD", text)
    bare = "".join(c for c in decomposed if not unicodedata.combining(c) or ord(c) > 0x36F)
    return unicodedata.normalize("NFC", bare)


# Parts of a request with several needs: sentences, and clauses that ask for something further.
#
# "Book a table, and then tell me tomorrow's weather" is two needs, and a tool for one of them has little in common with the
# whole. A quotation is never cut, however many full stops it holds, unless it is the whole request.

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

MAX_REQUEST_PARTS = 12
"""The maximum number of parts of one request. The last part includes the rest."""

_LONGEST_REQUEST = 8_000
"""The maximum characters of a request; the rest is ignored."""

_SHORTEST = 3
"""The minimum words of a part. A shorter one belongs to the previous part."""


def split_request_into_needs(request: str) -> list[str]:
    """Return the parts of ``request`` in order; the request itself if it has one need."""
    lines = request[:_LONGEST_REQUEST].replace("\x02", " ").replace("\x03", " ").splitlines()
    text = _strip_outer_quotes("\n".join(line for each in lines if (line := " ".join(each.split()))))
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
    if len(out) > MAX_REQUEST_PARTS:
        out[MAX_REQUEST_PARTS - 1 :] = [" ".join(out[MAX_REQUEST_PARTS - 1 :])]
    return out if len(out) > 1 else [text.strip()]


def _strip_outer_quotes(text: str) -> str:
    """Return ``text`` without quotation marks around all of it."""
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
