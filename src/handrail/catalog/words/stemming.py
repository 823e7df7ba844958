"""The English stemmer "Porter2" (Snowball's ``english``): ``schedules``, ``scheduled`` and ``scheduling`` are one term.

After M. F. Porter, "The English (Porter2) stemming algorithm", snowballstem.org, without the apostrophe rules: words
come here without apostrophes. A word of another language mostly stays what it is, which is as good.
"""

from __future__ import annotations

import re
from functools import lru_cache

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
        if rest.endswith(("at", "bl", "iz")):
            return rest + "e"
        if rest.endswith(_DOUBLE):
            return rest if len(rest) == 3 and rest[0] in "aeo" else rest[:-1]
        return rest + "e" if len(rest) <= first and _SHORT.match(rest) else rest
    return word


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
