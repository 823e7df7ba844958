"""What became of each edit, by the log and by the file, and whether all is as it must be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from demos.doors.journal import Attempt, Journal
from demos.doors.opened import Heard
from demos.doors.place import NAMES, ONE, TERMINAL, Place
from demos.tour.effects import Effect, survivors
from handrail import LogReader, LogVerification

_STOPPED = ("interrupted", "cancelled", "timeout")
"""How a call ends in the middle: what it did until then is done."""
_ENDED = ("output", "error", "rejected", "interrupted", "not-run")


@dataclass(slots=True)
class Account:
    """One door's edits.

    :param landed: boxes that are ticked, by a call that the log calls successful or stopped in the middle
    :param reported: why each of the others is not
    :param later: how many were tried more than once before they landed
    """

    door: str
    boxes: list[str]
    landed: list[str] = field(default_factory=list[str])
    reported: dict[str, str] = field(default_factory=dict[str, str])
    unaccounted: list[str] = field(default_factory=list[str])
    later: int = 0
    stopped: dict[str, str] = field(default_factory=dict[str, str])
    """Those that are ticked although no call about them ended well, with how the last one ended."""

    @property
    def why(self) -> str:
        """Why what did not land did not, and what is to be known of what did."""
        parts = [f"{box}: {why}" for box, why in self.reported.items()]
        parts += [f"{box}: there, though its call was {kind}" for box, kind in self.stopped.items()]
        parts += [f"{box}: NOT ACCOUNTED FOR" for box in self.unaccounted]
        return "; ".join(parts)


def ticked(place: Place) -> list[str]:
    """The boxes that are ticked in the file."""
    lines = place.board.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("- [x] ") for line in lines if line.startswith("- [x] ")]


def of(place: Place, journal: Journal) -> list[Account]:
    """What became of each door's edits."""
    there = set(ticked(place))
    return [_account(place, journal, door, there) for door in NAMES]


def _account(place: Place, journal: Journal, door: str, there: set[str]) -> Account:
    account = Account(door, place.of(door))
    for box in account.boxes:
        tries = [attempt for attempt in journal.attempts.values() if box in attempt.boxes]
        success = any(attempt.state == "landed" for attempt in tries)
        stopped = [attempt.kind for attempt in tries if attempt.kind in _STOPPED]
        last = next((a for a in reversed(tries) if a.state in ("rejected", "interrupted")), None)
        if box in there and (success or stopped):
            account.landed.append(box)
            account.later += len(tries) > 1
            if not success:
                account.stopped[box] = stopped[-1]
        elif box not in there and not success and last is not None:
            account.reported[box] = last.kind
        else:
            account.unaccounted.append(box)
    return account


def effects(
    place: Place,
    journal: Journal,
    made: Sequence[Account],
    heard: Mapping[str, Heard],
    reader: LogReader,
    verification: LogVerification,
) -> list[Effect]:
    """Everything that must be so at the end."""
    return [
        _every_edit(made),
        _file(place),
        _heard(made, heard),
        _killed(place, journal),
        _taken_over(journal),
        _after_the_kill(place, journal),
        _asked(place, journal, reader),
        _one_outcome(reader),
        _one_log(place, verification),
        _nobody_left(place),
    ]


def _every_edit(made: Sequence[Account]) -> Effect:
    lost = [box for account in made for box in account.unaccounted]
    return Effect("every edit is in the file, or reported", not lost, f"not so: {' '.join(lost)}")


def _file(place: Place) -> Effect:
    name = "the file holds exactly the ticked boxes: nothing lost, nothing twice"
    text = place.board.read_text(encoding="utf-8")
    return Effect(name, text == place.text(ticked(place)), repr(text))


def _heard(made: Sequence[Account], heard: Mapping[str, Heard]) -> Effect:
    """Each box that a door was told about last."""
    landed = {box for account in made for box in account.landed if box not in account.stopped}
    told = {box: there for one in heard.values() for box, there in one.landed.items()}
    wrong = [box for box, there in told.items() if there != (box in landed)]
    return Effect("each door was told what happened", bool(told) and not wrong, f"told otherwise: {' '.join(wrong)}")


def _killed(place: Place, journal: Journal) -> Effect:
    first, second = place.slow
    states = [a.state for a in journal.attempts.values() if a.boxes == [first, second]]
    there = ticked(place)
    so = states == ["interrupted"] and first in there and second not in there
    name = "the call that was killed in the middle is on record as interrupted, and was not run again"
    return Effect(name, so, f"{states}; {first} ticked: {first in there}, {second} ticked: {second in there}")


def _taken_over(journal: Journal) -> Effect:
    holders = journal.holders
    so = len(holders) > 1 and holders[0].door == ONE and holders[0].killed and holders[1].door != ONE
    so = so and [held.token for held in holders] == sorted({held.token for held in holders})
    return Effect("another door took over", so, ", ".join(f"{held.token}: {held.door}" for held in holders))


def _after_the_kill(place: Place, journal: Journal) -> Effect:
    """By the order of the log's records: what landed after the interruption was found."""
    broken = next((a for a in journal.attempts.values() if a.boxes == place.slow), None)
    since = 0 if broken is None else broken.ended
    doors = {a.door for a in journal.attempts.values() if a.state == "landed" and a.ended > since}
    missed = [NAMES[door] for door in NAMES if door != ONE and door not in doors]
    return Effect("the other doors went on with their work", since > 0 and not missed, f"not {', '.join(missed)}")


def _asked(place: Place, journal: Journal, reader: LogReader) -> Effect:
    """What no rule allowed was allowed by a person, once for each."""
    wanted = [*place.of(TERMINAL), place.asked]
    landed = [a for a in journal.attempts.values() if a.state == "landed" and set(a.boxes) & set(wanted)]
    by = [_by(reader, attempt) for attempt in landed]
    so = sorted(box for a in landed for box in a.boxes) == sorted(wanted) and set(by) == {"person"}
    found = f"{[a.boxes for a in landed]}, allowed by {by}"
    return Effect("what needed a person was allowed by one, and ran once", so, found)


def _by(reader: LogReader, attempt: Attempt) -> object:
    records = list(reader.records(call=attempt.call_id, kind="authorised"))
    return (records[-1].body or {}).get("by") if records else None


def _one_outcome(reader: LogReader) -> Effect:
    open_ = [row.call_id for row in reader.calls(limit=100_000) if row.state not in _ENDED]
    counts = Counter(
        record.call_id for kind in ("committed", "rejected", "interrupted") for record in reader.records(kind=kind)
    )
    twice = [call for call, count in counts.items() if count > 1]
    return Effect("every call has one outcome on record", not open_ and not twice, f"none {open_}, several {twice}")


def _one_log(place: Place, verification: LogVerification) -> Effect:
    logs = list((place.state / "ws").glob("*/handrail.db"))
    so = verification.ok and len(logs) == 1
    return Effect("there is one log, and it is intact", so, f"{len(logs)} logs; {verification}")


def _nobody_left(place: Place) -> Effect:
    left = survivors(place.folder)
    return Effect("no process is left", not left, "; ".join(left))
