"""Schedules across clock changes of every zone, against a slow reference that checks each minute."""

from __future__ import annotations

import functools
import zoneinfo
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handrail.contract.services.channels_and_triggers import Trigger
from handrail.session.inbound.trigger_scheduler import SECOND_NS, UtcOffset, compute_next_firing_ns

pytestmark = [
    pytest.mark.proves("A-07"),
    pytest.mark.skipif(not zoneinfo.available_timezones(), reason="no zones are known on this machine"),
]
MINUTE_S, DAY_S = 60, 86_400
EPOCH = datetime(1970, 1, 1)
SINCE, UNTIL = (int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (1985, 2030))


@dataclass(frozen=True)
class Change:
    """Clocks that are changed.

    :param at: when, in seconds
    :param before: how far they were ahead of UTC, in seconds, and ``after``
    """

    zone: str
    at: int
    before: int
    after: int


def of(zone: str) -> UtcOffset:
    return _of(zone)


@functools.cache
def _of(zone: str) -> UtcOffset:
    info = zoneinfo.ZoneInfo(zone)

    def ahead(at_s: int) -> int:
        offset = datetime.fromtimestamp(at_s, info).utcoffset()
        assert offset is not None
        return int(offset.total_seconds())

    return ahead


def changes_of(zone: str) -> Iterator[Change]:
    """Those that are a week apart; no others are known of these years."""
    ahead = of(zone)
    step, last = 5 * DAY_S, ahead(SINCE)
    for at in range(SINCE + step, UNTIL, step):
        if (now := ahead(at)) != last:
            low, high = at - step, at
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if ahead(middle) == last else (low, middle)
            yield Change(zone, high, last, now)
            last = now


@functools.cache
def all_changes() -> Sequence[Change]:
    """Of all zones, one for each pair of offsets and time of day: what is special of a zone is there, and little twice."""
    found: dict[tuple[int, int, int], Change] = {}
    for zone in sorted(zoneinfo.available_timezones()):
        for change in changes_of(zone):
            found.setdefault((change.before, change.after, change.at % DAY_S), change)
    return tuple(found.values())


@dataclass(frozen=True)
class Fields:
    """A schedule, plainly. None for every hour, or every day."""

    minutes: frozenset[int]
    hours: frozenset[int] | None
    weekdays: frozenset[int] | None = None

    @property
    def cron(self) -> str:
        def listed(values: frozenset[int] | None) -> str:
            return "*" if values is None else ",".join(map(str, sorted(values)))

        return f"{listed(self.minutes)} {listed(self.hours)} * * {listed(self.weekdays)}"

    def name(self, shown: datetime) -> bool:
        return (
            shown.minute in self.minutes
            and (self.hours is None or shown.hour in self.hours)
            and (self.weekdays is None or shown.isoweekday() % 7 in self.weekdays)
        )


def reference(fields: Fields, change: Change, start: int, end: int) -> list[int]:
    """When it fires after ``start`` and until ``end``, by a look at every minute."""
    ahead = of(change.zone)
    shown: dict[datetime, list[int]] = {}
    for at in range(start - 3 * DAY_S, end + 3 * DAY_S, MINUTE_S):
        shown.setdefault(EPOCH + timedelta(seconds=at + ahead(at)), []).append(at)
    fires: set[int] = set()
    wall, last = min(shown), max(shown)
    while wall <= last:
        if fields.name(wall):
            times = shown.get(wall, [])
            if fields.hours is None:
                fires.update(times)  # each time that it is shown, if at all
            elif times:
                fires.add(next((at for at in times if at > start), times[0]))  # once
            else:
                fires.add(int((wall - EPOCH).total_seconds()) - change.before)  # as if the clocks had not changed yet
        wall += timedelta(minutes=1)
    return sorted(at for at in fires if start < at <= end)


def fires(fields: Fields, change: Change, start: int, end: int) -> list[int]:
    """Return the same for a schedule that is added at ``start``."""
    trigger = Trigger("t", "s", "schedule", "x", start * SECOND_NS, cron=fields.cron)
    found: list[int] = []
    now = start * SECOND_NS
    while (
        following := compute_next_firing_ns(trigger, now, of(change.zone))
    ) is not None and following <= end * SECOND_NS:
        assert following > now
        found.append(following // SECOND_NS)
        now = following
    return found


def format_times(times: Sequence[int], zone: str) -> list[str]:
    info = zoneinfo.ZoneInfo(zone)
    return [f"{datetime.fromtimestamp(at, info):%d %H:%M %z}" for at in times]


def test_schedules_follow_the_local_clock_at_every_offset_change_of_every_zone() -> None:
    """Every hour, and once a day within what is shown twice or not at all."""
    assert any(abs(change.after - change.before) == 1800 for change in all_changes())
    for change in all_changes():
        around = EPOCH + timedelta(seconds=change.at + min(change.before, change.after))
        near = around + timedelta(seconds=abs(change.after - change.before) // 2)
        for fields in (
            Fields(frozenset((0, 30)), None),
            Fields(frozenset((near.minute,)), frozenset((near.hour,))),
        ):
            start, end = (change.at - 3 * 3600) // 60 * 60, change.at + DAY_S
            expected = reference(fields, change, start, end)
            assert format_times(fires(fields, change, start, end), change.zone) == format_times(
                expected, change.zone
            ), (fields, change)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_schedule_follows_the_clock_across_clock_changes_and_never_fires_late_or_twice(data: st.DataObject) -> None:
    change = data.draw(st.sampled_from(all_changes()))
    fields = Fields(
        data.draw(st.frozensets(st.integers(0, 59), min_size=1, max_size=3)),
        data.draw(st.none() | st.frozensets(st.integers(0, 23), min_size=1, max_size=23)),
        data.draw(st.none() | st.frozensets(st.integers(0, 6), min_size=1, max_size=6)),
    )
    start = (change.at + data.draw(st.integers(-30 * 60, 30 * 60)) * 60) // 60 * 60
    end = start + 2 * DAY_S
    expected = reference(fields, change, start, end)
    assert format_times(fires(fields, change, start, end), change.zone) == format_times(expected, change.zone)


@pytest.mark.parametrize(
    ("cron", "from_", "times"),
    [
        # half an hour back: 01:30 to 02:00 is shown twice
        ("0 * * * *", "2026-04-04T13:30", "01:00 02:00 03:00"),
        ("*/30 * * * *", "2026-04-04T13:55", "01:00 01:30 01:30 02:00 02:30"),
        ("45 1 * * *", "2026-04-04T13:55", "01:45 01:45"),
        # half an hour forward: 02:00 to 02:30 is passed over
        ("0 * * * *", "2026-10-03T14:00", "01:00 03:00 04:00"),
        ("*/30 * * * *", "2026-10-03T14:00", "01:00 01:30 02:30 03:00"),
        ("15 2 * * *", "2026-10-03T14:00", "02:45 02:15"),
    ],
)
def test_a_clock_change_of_half_an_hour_shifts_no_schedule(cron: str, from_: str, times: str) -> None:
    now = int(datetime.fromisoformat(f"{from_}+00:00").timestamp()) * SECOND_NS
    trigger = Trigger("t", "s", "schedule", "x", now, cron=cron)
    found: list[int] = []
    for _ in times.split():
        following = compute_next_firing_ns(trigger, now, of("Australia/Lord_Howe"))
        assert following is not None
        now = following
        found.append(now // SECOND_NS)
    assert [shown[3:8] for shown in format_times(found, "Australia/Lord_Howe")] == times.split()


def test_a_late_firing_is_not_repeated_when_the_clocks_are_set_back() -> None:
    added, late = (
        int(datetime.fromisoformat(f"2026-10-{when}+00:00").timestamp()) * SECOND_NS
        for when in ("20T12:00", "25T01:10")
    )
    trigger = Trigger("t", "s", "schedule", "x", added, cron="30 2 * * *")
    following = compute_next_firing_ns(trigger, late, of("Europe/Berlin"))
    assert following is not None
    assert format_times([following // SECOND_NS], "Europe/Berlin") == ["26 02:30 +0100"]
