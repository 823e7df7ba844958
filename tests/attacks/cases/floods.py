"""Floods of approval requests, false project files, and attacks on the log."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.attacks.case import Case
from tests.attacks.victim import VictimHome

from handrail.contract.approval_requests import DeferApprovals
from handrail.contract.errors import StartError
from handrail.kernel.workspace_opening import open_kernel

_ASKED = 130


async def _many_requests(home: VictimHome) -> str | None:
    """A model that asks again and again buries the one request that matters."""
    async with home.kernel(name="asking") as kernel:
        session = await kernel.session(approval_handler=DeferApprovals())
        found = [await session.call("write", {"path": f"n{n}.txt", "content": "x"}) for n in range(_ASKED)]
        waiting = len(kernel.approvals.list_pending())
    kinds = {result.error_kind for result in found if "awaiting_approval" not in result.metadata}
    return None if waiting == 100 and kinds == {"limit"} else f"{waiting} wait; the others ended as {kinds}"


async def _keys_as_a_workspace(home: VictimHome) -> str | None:
    """No folder of keys or settings is opened without a word, by its name or by a link."""
    opened: list[str] = []
    state = home.state.parent / "of-keys"
    (aside := Path(home.workspace).parent / "innocent").unlink(missing_ok=True)
    for place in (".ssh", ".config", ".config/gh", ".aws", ".cache"):
        folder = home.path / place
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        aside.symlink_to(folder)
        for way in (folder, aside):
            try:
                async with open_kernel(way, state=state):
                    opened.append(str(way))
            except StartError as error:
                if "--allow-home" not in str(error):
                    opened.append(f"{way}: {error}")
        aside.unlink()
        if made:
            shutil.rmtree(folder)
    return None if not opened else f"opened: {opened}"[:600]


async def _a_log_that_is_removed(home: VictimHome) -> str | None:
    """Calls that would be in no log are not run."""
    async with home.kernel(name="log", rules=["allow write"]) as kernel:
        session = await kernel.session()
        first = await session.call("write", {"path": "logged.txt", "content": "x"})
        database = Path(kernel.state_folder) / "handrail.db"
        database.rename(aside := database.with_name("aside"))
        found = [await session.call("write", {"path": f"unlogged{n}.txt", "content": "x"}) for n in range(3)]
        ran = [path.name for path in Path(home.workspace).glob("unlogged*")]
        aside.rename(database)
        back = await session.call("write", {"path": "logged.txt", "content": "y"})
    (Path(home.workspace) / "logged.txt").unlink(missing_ok=True)
    kinds = [result.error_kind for result in found]
    held = first.ok and kinds == ["unavailable"] * 3 and not ran and back.error_kind != "unavailable"
    return None if held else f"{first!r} {kinds} {ran} {back!r}"[:900]


CASES: list[Case] = [
    Case("a flood of requests", "permission", "approval fatigue", "a hundred wait, more are refused", _many_requests),
    Case(
        "keys as the workspace",
        "files",
        "an agent that is started in ~/.ssh",
        "the flag is asked for",
        _keys_as_a_workspace,
    ),
    Case(
        "a log that is removed",
        "files",
        "an audit log that is unlinked while held",
        "nothing runs",
        _a_log_that_is_removed,
    ),
]
