"""Links that replace a checked file: the opened file is always the checked one.

In threads of this process, on files of a temporary folder: the attacker is no program, so nothing needs a sandbox.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.attacks.victim import AgreeingUser

from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = [pytest.mark.attack("files"), pytest.mark.proves("S-03")]

SECRET = "TOP-SECRET"
_ROUNDS = [
    pytest.param(200, id="200 rounds"),
    pytest.param(10_000, id="10,000 rounds", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
]
_CALM_EVERY = 20
"""Each so many rounds, one runs without swaps, so that calls come through on a slow machine, too."""


def _exchange(one: Path, other: Path) -> None:
    """Put ``other`` in the place of ``one``, with no moment without either where the kernel can (RENAME_EXCHANGE)."""
    import ctypes

    libc = ctypes.CDLL(None)
    if libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2) != 0:
        raise OSError("renameat2")


class _Swaps:
    """The swaps of a thread: how many were made, and a lock to hold while none may be made."""

    def __init__(self) -> None:
        self.count = 0
        self.pausing = threading.Lock()

    @contextmanager
    def calm_round(self, number: int, ws: Path) -> Generator[None]:
        """Make each ``_CALM_EVERY``-th round one without swaps, in which the harmless file is in its place."""
        if number % _CALM_EVERY:
            yield
            return
        with self.pausing:
            for name in ("f", "d"):
                if (ws / name).is_symlink():
                    with suppress(OSError):  # a call has moved the other away
                        _exchange(ws / name, ws / f"{name}-link")
            yield


@contextmanager
def _swapping(place: Path, pace_s: float = 0.0) -> Generator[_Swaps]:
    """Swap a file for a link to a secret, and a folder for a link to the secret's folder.

    :param pace_s: between two swaps; without one, as fast as it goes
    """
    ws = place / "ws"
    outside = place / "beside"
    outside.mkdir()
    (outside / "f").write_text(SECRET)
    (ws / "d").mkdir(parents=True)
    (ws / "d" / "f").write_text("harmless\n")
    (ws / "f").write_text("harmless\n")
    (ws / "d-link").symlink_to(outside)
    (ws / "f-link").symlink_to(outside / "f")
    stop, swaps = threading.Event(), _Swaps()

    def swap() -> None:
        while not stop.wait(pace_s):
            with swaps.pausing, suppress(OSError):  # what a write makes anew may be in the way for a moment
                _exchange(ws / "f", ws / "f-link")
                _exchange(ws / "d", ws / "d-link")
                swaps.count += 1

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield swaps
    finally:
        stop.set()
        thread.join()


_SEARCHES = ("glob", "grep")
"""A program is started for each of these, so that fewer of them are made in as many rounds."""
_CALLS: dict[str, list[tuple[str, dict[str, str]]]] = {
    "read": [("read", {"path": "f"}), ("read", {"path": "d/f", "unit": "bytes"})],
    "write": [("write", {"path": "d/new-#", "content": "written"}), ("write", {"path": "f", "content": "written"})],
    "edit": [
        ("read", {"path": "f"}),
        ("edit", {"path": "f", "old": "harm", "new": "harm#"}),
        ("edit", {"path": "d/f", "old": "T", "new": "t"}),
    ],
    "glob": [("glob", {"pattern": "**", "path": "d"}), ("glob", {"pattern": "d/*"})],
    "grep": [
        ("grep", {"pattern": ".", "path": "d"}),
        ("grep", {"pattern": "SECRET", "path": "f"}),
        ("grep", {"pattern": "SECRET"}),
    ],
}


@pytest.mark.parametrize("rounds", _ROUNDS)
@pytest.mark.parametrize("name", _CALLS)
async def test_a_link_swapped_for_a_checked_file_is_never_followed_outside_the_workspace(
    tmp_path: Path, request: pytest.FixtureRequest, name: str, rounds: int
) -> None:
    if name == "grep":
        request.getfixturevalue("confining")
    place = tmp_path.resolve()
    # An edit judges, reads and writes: among swaps without a pause none would ever come through.
    with _swapping(place, 0.002 if name == "edit" else 0.0) as swaps:
        async with temporary_kernel(place, rules=["ask effect:external"]) as kernel:
            session = await kernel.session(approval_handler=AgreeingUser())
            done, answered, result = 0, 0, None
            wanted = rounds // 10 if name in _SEARCHES else rounds
            while done < wanted or swaps.count < rounds:
                with swaps.calm_round(done // len(_CALLS[name]), place / "ws"):
                    for tool, arguments in _CALLS[name]:
                        numbered = {key: value.replace("#", str(done)) for key, value in arguments.items()}
                        result = await session.call(tool, numbered)
                        assert SECRET not in repr(result), result
                        answered += result.ok and tool == name
                        done += 1
    assert answered > 0, f"no call ever came through, so that nothing was put to the test: {result}"
    assert (place / "beside" / "f").read_text() == SECRET
    assert os.listdir(place / "beside") == ["f"]
    shutil.rmtree(place / "state", ignore_errors=True)


@pytest.mark.parametrize("rounds", _ROUNDS)
async def test_a_link_swapped_in_during_a_move_or_delete_affects_nothing_outside(tmp_path: Path, rounds: int) -> None:
    """Source: ``mv`` and ``rm -r`` that were raced into another folder (CWE-367)."""
    place = tmp_path.resolve()
    moved = deleted = done = 0
    with _swapping(place, 0.01) as swaps:
        async with temporary_kernel(place, rules=["ask effect:external"]) as kernel:
            session = await kernel.session(approval_handler=AgreeingUser())
            while done < rounds or swaps.count < rounds:
                done += 1
                with swaps.calm_round(done, place / "ws"):
                    await session.call("write", {"path": f"d/x-{done}", "content": "mine"})
                    moved += (await session.call("file.move", {"path": f"d/x-{done}", "to": f"y-{done}"})).ok
                    deleted += (await session.call("file.delete", {"path": f"y-{done}"})).ok
                    for path in ("d", "f", "d/f"):
                        if (await session.call("file.move", {"path": path, "to": "z"})).ok:
                            assert SECRET not in _read_all(place / "ws" / "z")
                            await session.call("file.move", {"path": "z", "to": path})
                    await session.call("file.delete", {"path": "d/f" if done % 2 else "z", "recursive": True})
                with swaps.pausing:
                    _restore_pairs(place)
    assert moved > 0 and deleted > 0, "no call ever came through, so that nothing was put to the test"
    assert (place / "beside" / "f").read_text() == SECRET
    assert os.listdir(place / "beside") == ["f"]
    shutil.rmtree(place / "state", ignore_errors=True)


def _restore_pairs(place: Path) -> None:
    """Make the entries again that a call moved away while they were links, since no swap comes through without them."""
    ws, outside = place / "ws", place / "beside"
    if (ws / "z").is_symlink():
        (ws / "z").unlink()
    if not os.path.lexists(ws / "f"):
        if (ws / "f-link").is_symlink():
            (ws / "f").write_text("harmless\n")
        else:
            (ws / "f").symlink_to(outside / "f")
    if not os.path.lexists(ws / "d"):
        if (ws / "d-link").is_symlink():
            (ws / "d").mkdir()
        else:
            (ws / "d").symlink_to(outside)


def _read_all(path: Path) -> str:
    """The texts of a file, or of all files in a folder, without following a link."""
    files = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    return "".join(one.read_text() for one in files if one.is_file() and not one.is_symlink())


@pytest.mark.timeout(600)
async def test_the_swaps_catch_a_reader_that_checks_before_it_opens(tmp_path: Path) -> None:
    """The control: with the same swaps, the way that others go is walked around within as many rounds."""
    place = tmp_path.resolve()

    def checked_then_opened() -> str:
        path = place / "ws" / "f"
        if path.is_symlink():
            return ""
        return path.read_text()

    with _swapping(place):
        for _ in range(200_000):
            with suppress(OSError):
                if SECRET in checked_then_opened():
                    return
    pytest.fail("the swaps never hit between check and opening: they would prove nothing")
