"""The places of a patch's hunks in a file: found by their lines, in grades from exact to similar.

A hunk has to have exactly one place. If its lines occur several times, other evidence may decide: the order of the hunks, the
lines that the patch names before them, and line numbers that agree. Without such evidence the patch is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Literal, NamedTuple

from handrail.contract.errors import ToolError, quote_text_or_length
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.neutralisation import OPEN, neutralise_text
from handrail.contract.text.patch_text import HunkLine, PatchHunk
from handrail.contract.text.text_encodings import replace_invalid_bytes
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names

MatchGrade = Literal["exact", "whitespace", "indent", "typography"]
"""How a hunk was matched. ``whitespace``: except for whitespace at the end of lines. ``indent``: except for the indentation, too.
``typography``: except for the form of quotes, dashes and spaces, too."""
GRADES: tuple[MatchGrade, ...] = ("exact", "whitespace", "indent", "typography")

_MOST_PLACES = 200
"""The places at which one hunk is compared further."""
_MOST_WORK = 10_000_000
"""The compared lines of one file."""
_MOST_SCOPES = 50
"""The places of one anchor."""
_MOST_ROUNDS = 8
"""How often evidence about one hunk is used for the others."""
_MOST_EXPLAINED = 4
_MOST_SHOWN = 20
_NEAR_LINES = 6
_HEADING = 80
"""The characters of a heading that git writes at most."""
_FUNCTION_LINE = compile_regex_lazily(r"[A-Za-z_$]")
"""The start of a line that git takes for a heading, without a driver for the language."""
_TYPOGRAPHY = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛′´`", "'"),
        **dict.fromkeys("“”„‟″«»", '"'),
        **dict.fromkeys("‐‑‒–—―−", "-"),
        **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "),
        "…": "...",
    }
)


class HunkLocation(NamedTuple):
    """A place where the lines of a hunk are.

    :param lines: the lines of the hunk that were compared
    :param first: the index of its first line in the file
    :param last: the index after its last line
    :param core: the range of the file that changes, without the context around it
    :param is_applied: whether the file has the lines as they are after the change
    """

    hunk: PatchHunk
    lines: tuple[HunkLine, ...]
    first: int
    last: int
    core: tuple[int, int]
    grade: MatchGrade
    is_applied: bool = False


def _make_locations(
    hunk: PatchHunk, lines: tuple[HunkLine, ...], starts: Iterable[int], grade: MatchGrade, *, applied: bool = False
) -> list[HunkLocation]:
    """Return the places at which ``lines`` begin."""
    left_out = "-" if applied else "+"
    length = sum(line.sign != left_out for line in lines)
    lead = next((at for at, line in enumerate(lines) if line.sign != " "), length)
    trail = next((at for at, line in enumerate(reversed(lines)) if line.sign != " "), length - lead)
    return [
        HunkLocation(hunk, lines, at, at + length, (at + lead, max(at + length - trail, at + lead)), grade, applied)
        for at in starts
    ]


class HunkMismatch(Exception):
    """An error for a hunk without a single place."""


@dataclass(slots=True)
class FileLines:
    """The lines of a file without their ends, in the form for each grade."""

    bodies: Sequence[str]
    _keys: dict[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]], init=False)
    _positions: dict[str, Mapping[str, list[int]]] = field(
        default_factory=dict[str, Mapping[str, list[int]]], init=False
    )
    _work: int = field(default=0, init=False)

    def find(self, wanted: Sequence[str], grade: MatchGrade, *, as_shown: bool = False) -> list[int]:
        """Return the indexes at which ``wanted`` begins, in order."""
        form = f"{grade} shown" if as_shown else grade
        keys = self._keys_of(form, grade, as_shown=as_shown)
        sought = [_make_key(line, grade) for line in wanted]
        if not sought or len(sought) > len(keys):
            return []
        positions = self._positions_of(form)
        rarest = min(range(len(sought)), key=lambda at: len(positions.get(sought[at], ())))
        found: list[int] = []
        for position in positions.get(sought[rarest], ()):
            start = position - rarest
            self._count_work(len(sought))
            if start >= 0 and keys[start : start + len(sought)] == sought:
                found.append(start)
                if len(found) > _MOST_PLACES:
                    break
        return found

    def matches_at(self, start: int, wanted: Sequence[str]) -> bool:
        """Return whether these lines are exactly here."""
        return start >= 0 and list(self.bodies[start : start + len(wanted)]) == list(wanted)

    def find_similar_lines(self, text: str) -> Sequence[int]:
        """Return the indexes of the lines that are ``text`` without the blanks around it, or else begin with it."""
        for grade in ("indent", "typography"):
            keys = self._keys_of(grade, grade, as_shown=False)
            sought = _make_key(text, grade)
            if found := self._positions_of(grade).get(sought):
                return found
            self._count_work(len(keys))
            if found := [at for at, key in enumerate(keys) if key.startswith(sought)]:
                return found
        return []

    def find_block_end(self, first: int) -> int:
        """Return the index after the block of code that a line begins, by indentation."""
        indent = _measure_indent(self.bodies[first])
        at = first + 1
        while at < len(self.bodies):
            line = self.bodies[at]
            stripped = line.strip()
            if stripped and _measure_indent(line) <= indent and not (at == first + 1 and stripped == "{"):
                break
            at += 1
        self._count_work(at - first)
        return at

    def find_hunk_heading(self, before: int) -> str:
        """Return the line that git would show as the heading of a hunk that begins here."""
        for at in range(before - 1, -1, -1):
            if _FUNCTION_LINE.match(self.bodies[at]):
                self._count_work(before - at)
                return self.bodies[at].rstrip()[:_HEADING].rstrip()
        self._count_work(before)
        return ""

    def _keys_of(self, form: str, grade: MatchGrade, *, as_shown: bool) -> Sequence[str]:
        if (keys := self._keys.get(form)) is None:
            lines: Iterable[str] = self.bodies
            if as_shown:
                lines = (neutralise_text(replace_invalid_bytes(line)) for line in self.bodies)
            keys = self._keys[form] = [_make_key(line, grade) for line in lines]
        return keys

    def _positions_of(self, form: str) -> Mapping[str, list[int]]:
        if (found := self._positions.get(form)) is None:
            made: dict[str, list[int]] = {}
            for at, key in enumerate(self._keys[form]):
                made.setdefault(key, []).append(at)
            found = self._positions[form] = made
        return found

    def _count_work(self, lines: int) -> None:
        self._work += lines
        if self._work > _MOST_WORK:
            raise ToolError(
                "The hunks have too many possible places in this file. Use hunks with more distinctive lines, or split the patch.",
                kind="limit",
            )


def _make_key(line: str, grade: MatchGrade) -> str:
    if grade == "exact":
        return line
    if grade == "whitespace":
        return line.rstrip()
    return line.strip() if grade == "indent" else line.translate(_TYPOGRAPHY).strip()


def _measure_indent(line: str) -> int:
    expanded = line.expandtabs(8)
    return len(expanded) - len(expanded.lstrip())


def locate_hunks(file: FileLines, hunks: Sequence[PatchHunk]) -> tuple[list[HunkLocation], dict[int, str]]:
    """Return the place of each hunk, and the problem of each hunk without one, by its number.

    If there is any problem, the places are not complete.

    :raises ToolError: ``limit`` if the comparison takes too long
    """
    problems: dict[int, str] = {}
    candidates: dict[int, list[HunkLocation]] = {}
    for hunk in hunks:
        try:
            candidates[hunk.number] = _find_candidates(file, hunk, is_brief=len(problems) >= _MOST_EXPLAINED)
        except HunkMismatch as error:
            problems[hunk.number] = str(error)
    rows = list(candidates.values())
    _decide(file, rows)
    for row in rows:
        if len(row) > 1:
            problems[row[0].hunk.number] = _explain_ambiguity(row)
    places = [row[0] for row in rows if len(row) == 1]
    if not problems:
        places.sort(key=lambda place: (place.core, place.hunk.number))
        for before, place in pairwise(places):
            if place.core[0] < before.core[1]:
                number = place.hunk.number
                problems[number] = (
                    f"It changes line {place.core[0] + 1}, and so does hunk {before.hunk.number}. Merge both hunks."
                )
    return [_recognize_applied(file, place) for place in places], problems


def _find_candidates(file: FileLines, hunk: PatchHunk, *, is_brief: bool) -> list[HunkLocation]:
    """Return the places of the best grade that a hunk has.

    :param is_brief: whether a problem is not explained by similar lines
    :raises HunkMismatch: if there is none
    """
    scopes = _find_scopes(file, hunk.anchors)
    if not hunk.old:
        return _find_insertion(file, hunk, scopes)
    found = _find_lines(file, hunk, applied=False) or _find_lines(file, hunk, applied=True)
    if not found:
        raise HunkMismatch("Its lines are not in the file." if is_brief else _explain_missing(file, hunk))
    if hunk.is_at_end:
        found = [place for place in found if place.last == len(file.bodies)] or found
    if hunk.anchors and scopes is not None:
        within = [place for place in found if any(first <= place.core[0] <= end for first, end in scopes)]
        after = [place for place in found if place.core[0] >= scopes[0][0]]
        if not within and not after:
            lines = _join_numbers(place.first + 1 for place in found)
            raise HunkMismatch(
                f"Its lines are at {lines}, which is not after {quote_text_or_length(hunk.anchors[-1], 200)}."
            )
        found = within or after
    elif hunk.anchors and (len(found) > 1 or found[0].grade != "exact"):
        raise HunkMismatch(f"The line {quote_text_or_length(hunk.anchors[0], 200)} of its `@@` is not in the file.")
    return found


def _find_scopes(file: FileLines, anchors: Sequence[str]) -> list[tuple[int, int]] | None:
    """Return the blocks that the anchors of a hunk begin, each within the one before; None if one is missing.

    :raises HunkMismatch: if an anchor occurs too often
    """
    scopes = [(-1, len(file.bodies))]
    for anchor in anchors:
        within = (line for line in file.find_similar_lines(anchor) if any(first < line < end for first, end in scopes))
        inner = list(islice(within, _MOST_SCOPES + 1))
        if not inner:
            return None
        if len(inner) > _MOST_SCOPES:
            raise HunkMismatch(
                f"The line {quote_text_or_length(anchor, 200)} of its `@@` occurs more than {_MOST_SCOPES} times. Name a more "
                "distinctive line."
            )
        scopes = [(line, file.find_block_end(line)) for line in inner]
    return scopes


def _find_insertion(file: FileLines, hunk: PatchHunk, scopes: Sequence[tuple[int, int]] | None) -> list[HunkLocation]:
    """Return the places of a hunk that has only added lines.

    :raises HunkMismatch: if nothing says where they belong
    """
    if hunk.is_at_end or not file.bodies or hunk.old_line == len(file.bodies):
        return _make_locations(hunk, hunk.lines, [len(file.bodies)], "exact")
    if not hunk.anchors:
        raise HunkMismatch(
            "It has only added lines, and no context shows where they belong. Add context: the unchanged lines before and after them."
        )
    if scopes is None:
        raise HunkMismatch(f"The line {quote_text_or_length(hunk.anchors[0], 200)} of its `@@` is not in the file.")
    return _make_locations(hunk, hunk.lines, [first + 1 for first, _ in scopes], "exact")


def _find_lines(file: FileLines, hunk: PatchHunk, *, applied: bool) -> list[HunkLocation]:
    """Return the places where the lines before the change are, or those after it."""
    left_out = "-" if applied else "+"
    variants = [hunk.lines]
    if hunk.loose_tail and len(hunk.lines) > hunk.loose_tail:
        variants.append(hunk.lines[: -hunk.loose_tail])
    for grade in GRADES[:2] if applied else GRADES:
        for lines in variants:
            wanted = [line.text for line in lines if line.sign != left_out]
            if not wanted or (applied and not _proves_application(lines)):
                continue
            starts = file.find(wanted, grade)
            if not starts and any(OPEN in line or "\ufffd" in line for line in wanted):
                starts = file.find(wanted, grade, as_shown=True)
            if starts:
                return _make_locations(hunk, lines, starts, grade, applied=applied)
    return []


def _proves_application(lines: Sequence[HunkLine]) -> bool:
    """Return whether a file with these lines after the change has certainly been changed already."""
    if any(line.sign == "+" and line.text.strip() for line in lines):
        return True
    context = [line.sign == " " and bool(line.text.strip()) for line in lines]
    removed = [at for at, line in enumerate(lines) if line.sign == "-"]
    return bool(removed) and any(context[: removed[0]]) and any(context[removed[-1] :]) and sum(context) > 2


def _recognize_applied(file: FileLines, place: HunkLocation) -> HunkLocation:
    """Return the place as applied if the lines that it would insert are there already, and the hunk removes nothing."""
    signs = [line.sign for line in place.lines]
    added = [line.text for line in place.lines if line.sign == "+"]
    if place.is_applied or "-" in signs or not any(text.strip() for text in added):
        return place
    new = [line.text for line in place.lines]
    if signs[-1] == "+" and file.matches_at(place.first, new):
        return place._replace(is_applied=True)
    if signs[0] == "+" and " " in signs and file.matches_at(place.last - len(new), new):
        return place._replace(is_applied=True)
    return place


# The choice among several places.


def _decide(file: FileLines, rows: list[list[HunkLocation]]) -> None:
    """Remove the places from ``rows`` that other evidence excludes."""
    for _ in range(_MOST_ROUNDS):
        before = sum(map(len, rows))
        if before == len(rows):
            return
        _keep_ordered(rows)
        _keep_numbered(rows)
        if sum(map(len, rows)) == before:
            _keep_under_heading(file, rows)
            if sum(map(len, rows)) == before:
                return


def _keep_ordered(rows: list[list[HunkLocation]]) -> None:
    """Keep the places with which all hunks are in the order of the patch, if such an order exists."""
    if any(len(row) > _MOST_PLACES for row in rows):
        return
    earliest: list[int] = []
    low = 0
    for row in rows:
        earliest.append(low)
        ends = [place.core[1] for place in row if place.core[0] >= low]
        if not ends:
            return
        low = min(ends)
    latest: list[int] = []
    high = max(place.core[1] for row in rows for place in row)
    for row in reversed(rows):
        latest.append(high)
        starts = [place.core[0] for place in row if place.core[1] <= high]
        if not starts:
            return
        high = max(starts)
    for row, low, high in zip(rows, earliest, reversed(latest), strict=True):
        row[:] = [place for place in row if low <= place.core[0] and place.core[1] <= high]


def _shift_of(place: HunkLocation) -> int | None:
    """Return how far a place is from the line that the patch says; None if it says none."""
    line = place.hunk.old_line
    if line is None or place.grade != "exact" or place.is_applied:
        return None
    return place.first - (line - 1 if place.hunk.old else line)


def _keep_numbered(rows: list[list[HunkLocation]]) -> None:
    """Keep the places whose line numbers are as wrong as those of the hunks around them, or right."""
    shifts = [_shift_of(row[0]) if len(row) == 1 else None for row in rows]
    if any(shift is not None for shift in shifts):
        before = _carry_on(shifts)
        after = _carry_on(shifts[::-1])[::-1]
        for row, *around in zip(rows, before, after, strict=True):
            if len(row) > 1:
                fitting = [one for one in row if (shift := _shift_of(one)) is not None and shift in around]
                row[:] = fitting if len(fitting) == 1 else row
        return
    possible = [(row, {_shift_of(place) for place in row}) for row in rows if len(row) > 1]
    numbered = [(row, shifts) for row, shifts in possible if None not in shifts]
    if not numbered:
        return
    common = set(numbered[0][1])
    for _, one in numbered:
        common &= one
    if 0 in common or (len(common) == 1 and len(numbered) > 1):
        shift = 0 if 0 in common else common.pop()
        for row, _ in numbered:
            row[:] = [place for place in row if _shift_of(place) == shift]


def _carry_on(shifts: Sequence[int | None]) -> list[int | None]:
    """Return, for each position, the last shift that is known there or before."""
    last: int | None = None
    found: list[int | None] = []
    for shift in shifts:
        last = last if shift is None else shift
        found.append(last)
    return found


def _keep_under_heading(file: FileLines, rows: list[list[HunkLocation]]) -> None:
    """Keep the places below the heading that the patch shows."""
    for row in rows:
        heading = row[0].hunk.heading[:_HEADING].rstrip()
        if 1 < len(row) <= _MOST_PLACES and heading:
            fitting = [place for place in row if file.find_hunk_heading(place.first) == heading]
            if len(fitting) == 1:
                row[:] = fitting


# Problems, as texts that follow the name of the file and the number of the hunk.


def _explain_ambiguity(row: Sequence[HunkLocation]) -> str:
    count = f"{len(row)}" if len(row) <= _MOST_PLACES else f"more than {_MOST_PLACES}"
    numbers = _join_numbers(place.first + 1 for place in row)
    return (
        f"Its lines occur {count} times, at {numbers}. Add more of the unchanged lines around them, or name the function or "
        "class before them, as in `@@ def name():`."
    )


def _join_numbers(numbers: Iterable[int]) -> str:
    found = list(numbers)
    shown = ", ".join(map(str, found[:_MOST_SHOWN])) + (" and more" if len(found) > _MOST_SHOWN else "")
    return f"lines {shown}" if len(found) > 1 else f"line {shown}"


def _explain_missing(file: FileLines, hunk: PatchHunk) -> str:
    """Return what the file has at the most similar place."""
    bodies, old = file.bodies, hunk.old
    start = _find_similar_place(file, old)
    if start is None:
        near = max((hunk.old_line or 1) - 1, 0)
        explanation = "No similar lines exist."
    else:
        differing = next(
            (
                at
                for at, line in enumerate(old)
                if not 0 <= start + at < len(bodies) or bodies[start + at].strip() != line.strip()
            ),
            0,
        )
        near = min(max(start + differing, 0), max(len(bodies) - 1, 0))
        found = quote_text_or_length(_show(bodies[near]), 200) if start + differing == near and bodies else "missing"
        explanation = f"Line {start + differing + 1} is {found}, and the hunk expects {quote_text_or_length(old[differing], 200)}."
    first = max(min(near - _NEAR_LINES // 2 + 1, len(bodies) - _NEAR_LINES), 0)
    lines = [f"{first + at + 1}: {_show(line)[:200]}" for at, line in enumerate(bodies[first : first + _NEAR_LINES])]
    return (
        "\n".join((f"Its lines are not in the file. {explanation} The file has:", *lines))
        if lines
        else "The file is empty."
    )


def _find_similar_place(file: FileLines, old: Sequence[str]) -> int | None:
    """Return where most lines of a hunk are, or where its longest line has a similar one."""
    votes: dict[int, int] = {}
    for at, line in enumerate(old):
        if len(line.strip()) < 3:
            continue
        for start in file.find([line], "indent")[:50]:
            votes[start - at] = votes.get(start - at, 0) + 1
    if votes:
        return max(votes, key=lambda start: (votes[start], -start))
    longest = max(range(len(old)), key=lambda at: len(old[at]))
    stripped = [line.strip() for line in file.bodies[:2_000]]
    near = nearest_names(old[longest].strip(), dict.fromkeys(filter(None, stripped)), 1, cutoff=0.6)
    return stripped.index(near[0]) - longest if near else None


def _show(line: str) -> str:
    return neutralise_text(replace_invalid_bytes(line))


def reindent_added_lines(place: HunkLocation, file: FileLines) -> list[str]:
    """Return the added lines of a hunk with the indentation of the file.

    Lines that were matched with another indentation say how the patch was indented. If only the context differs, the added
    lines are as they should be.

    :raises HunkMismatch: if the indentation of the file is not certain
    """
    added = [line.text for line in place.lines if line.sign == "+"]
    if place.grade not in ("indent", "typography"):
        return added
    pairs: dict[str, list[tuple[str, str]]] = {" ": [], "-": []}
    at = place.first
    for line in place.lines:
        if line.sign != "+":
            body = file.bodies[at]
            if body.strip():
                pairs[line.sign].append((_lead_of(line.text), _lead_of(body)))
            at += 1
    removed = pairs["-"]
    if not removed:
        _check_plausible_depth(added, pairs[" "])
        return added
    if all(given == real for given, real in removed):
        return added
    known = dict((*pairs[" "], *removed))
    if any(known[given] != real for given, real in removed):
        raise HunkMismatch(
            "Its removed lines have a different indentation than the file. Copy the indentation of the file."
        )
    return [_reindent(text, known) for text in added]


def _reindent(text: str, known: Mapping[str, str]) -> str:
    lead = _lead_of(text)
    if not text.strip():
        return text
    if lead in known:
        return known[lead] + text[len(lead) :]
    nearest = max((one for one in known if lead.startswith(one)), key=len, default=None)
    if nearest is not None:
        return known[nearest] + text[len(nearest) :]
    shortest = min(known, key=len)
    if known[shortest].endswith(shortest):  # the patch has less indentation throughout
        return known[shortest][: len(known[shortest]) - len(shortest)] + text
    if shortest.endswith(known[shortest]) and lead.startswith(
        extra := shortest[: len(shortest) - len(known[shortest])]
    ):
        return text[len(extra) :]
    raise HunkMismatch(
        "Its added lines have an indentation that matches no line of the file. Copy the indentation of the file."
    )


def _check_plausible_depth(added: Sequence[str], context: Sequence[tuple[str, str]]) -> None:
    """Refuse added lines that would have less indentation than all lines around them, although the patch does not say so.

    :raises HunkMismatch: for such lines
    """
    depths = [_measure_indent(text) for text in added if text.strip()]
    if not depths or not context:
        return
    given, real = (min(_measure_indent(pair[side]) for pair in context) for side in (0, 1))
    if max(depths) < real and min(depths) >= given and given < real:
        raise HunkMismatch(
            f"Its added lines have {min(depths)} spaces at the start, and the lines around them have {real} in the file. "
            "Copy the indentation of the file."
        )


def _lead_of(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]
