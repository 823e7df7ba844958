"""A request that holds several needs, cut into its parts: sentences, and clauses that ask for something further.

"Book a table, and then tell me tomorrow's weather" is two needs, and a tool for one of them has little in common with
the whole. What is quoted is never cut, however many full stops it holds, unless it is the whole request.
"""

from __future__ import annotations

import re

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

_LONGEST = 8_000
"""Characters of a request that are read."""

_SHORTEST = 3
"""Words of a part; a shorter one belongs to the one before."""


def parts(request: str) -> list[str]:
    """The parts of ``request`` in order; the request itself where it is one need."""
    lines = request[:_LONGEST].replace("\x02", " ").replace("\x03", " ").splitlines()
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
