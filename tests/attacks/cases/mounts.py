"""Mounts: paths replaced while a sandbox is built, and mounted files that are replaced."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attacks.case import Case, breach, python
from tests.attacks.victim import SECRET, VictimHome, put, said_by

_ROUNDS = 120
_WATCHED_S = 30.0

_SWAPPER = """\
import os, time
os.chdir({folder!r})
open("ready", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
count = 0
while not os.path.exists("stop"):
    for target in {targets!r}:
        try:
            os.rename("pkg", "real")
            os.symlink(target, "pkg")
            time.sleep(0.0005)
            os.unlink("pkg")
        except OSError:
            pass
        try:
            os.rename("real", "pkg")
        except OSError:
            count += 1
            if os.path.isdir("real") and not os.path.islink("pkg"):
                os.rename("pkg", "in-the-way-%d" % count)
        time.sleep(0.0005)
"""


_LOOKER = """\
cd {folder}
cat pkg/id_ed25519 pkg/.ssh/id_ed25519 real/.env pkg/.env
for f in pkg/.bashrc pkg/authorized_keys pkg/.ssh/authorized_keys; do [ -e $f ] && echo owned >> $f; done
true
"""


async def _swapped_in_the_background(home: VictimHome) -> str | None:
    """A job that began before there was anything to keep or hide, so that it may move the folder, races each next call."""
    folder = home.workspace / "raced"
    put(folder / "pkg" / "harmless", "harmless\n")
    targets = [
        f"{home.path}/.ssh",
        f"/oldroot{home.path}/.ssh",
        str(home.path),
        f"/oldroot{home.path}",
        f"{folder}/other",
    ]
    put(folder / "other" / ".env", "harmless\n")
    put(folder / "swap.py", _SWAPPER.format(folder=str(folder), targets=targets))
    put(home.workspace / "look.sh", _LOOKER.format(folder=folder))  # a command that named the files is refused before
    kept = {path: path.read_bytes() for path in (home.path / ".bashrc", home.path / ".ssh" / "authorized_keys")}
    job = await home.call("bash", command=f"python3 {folder}/swap.py", background=True)
    if not job.ok:
        return f"the job did not begin: {job!r}"[:400]
    async with asyncio.timeout(_WATCHED_S):
        while not (folder / "ready").exists():
            await asyncio.sleep(0.01)
    put(folder / "pkg" / ".vscode" / "tasks.json", "{}\n")
    put(folder / "pkg" / ".env", f"{SECRET}-HIDDEN\n")
    (folder / "go").touch()
    answered = refused = 0
    try:
        for _ in range(_ROUNDS):
            result = await home.call("bash", command="bash look.sh", timeout_ms=20_000)
            if SECRET in said_by(result):
                return f"a key or a hidden file was read: {result!r}"[:600]
            changed = [str(path) for path, was in kept.items() if path.read_bytes() != was]
            if changed:
                return breach(changed, "written")
            answered += result.ok
            refused += result.error_kind == "conflict" and "the sandbox was prepared" in (result.error_text or "")
    finally:
        (folder / "stop").touch()
        told: Any = job.data
        await home.call("wait", job_id=told["job_id"])
        shutil.rmtree(folder, ignore_errors=True)
    return None if answered + refused else "no call was answered in any way that shows that it was tried"


_EXCHANGER = """\
import ctypes, os, random, time
libc = ctypes.CDLL(None, use_errno=True)
os.chdir({folder!r})

def exchange(one, other):
    libc.renameat2(-100, one.encode(), -100, other.encode(), 2)

open("ready", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
pairs = [(name, f"link{{number}}") for number, name in enumerate({places!r})]
for (_, link), target in zip(pairs, {places!r}.values()):
    os.symlink(target, link)
while not os.path.exists("stop"):
    name, link = random.choice(pairs)
    exchange(name, link)
    time.sleep(random.random() * 0.004)
    exchange(name, link)
    time.sleep(random.random() * 0.02)
"""
_PINNED = (
    "a/.vscode/tasks.json",
    "b/.vscode/tasks.json",
    "d/.git/config",
    "e/.envrc",
    "f/.bashrc",
    "kept.txt",
    "keep/k",
)
_LOOKER_AT_ALL = """\
for f in */.* */.*/* kept.txt keep/* hidden/* c/mid/* linked/* link*/* link*; do [ -f "$f" ] && cat "$f" && echo owned >> "$f"; done
true
"""


async def _exchanged_in_the_background(home: VictimHome) -> str | None:
    """Files, folders and parents that are pinned, hidden or linked change places with links out, also by other names of the root."""
    places = {
        "a/.vscode/tasks.json": f"{home.path}/.ssh/id_ed25519",
        "b/.vscode": f"{home.path}/.ssh",
        "c/mid": f"{home.path}/project_secret",
        "d/.git": f"{home.path}/.ssh",
        "e/.envrc": f"/oldroot{home.path}/.bashrc",
        "f/.bashrc": f"{home.path}/.bashrc",
        "kept.txt": f"{home.path}/.bashrc",
        "keep": f"/proc/self/root{home.path}/.ssh",
        "hidden": f"{home.path}/.aws",
        "linked/store.js": f"{home.path}/.bashrc",
    }
    robbed = [home.path / ".bashrc", *(home.path / ".ssh" / name for name in ("authorized_keys", "id_ed25519"))]
    rules = ("allow bash *", "deny fs.write keep/**", "deny fs.write kept.txt", "deny fs.read hidden/**")
    async with home.elsewhere(rules=rules) as (session, folder):
        put(folder / "exchange.py", _EXCHANGER.format(folder=str(folder), places=places))
        put(folder / "look.sh", _LOOKER_AT_ALL)
        job = await session.call("bash", {"command": "python3 exchange.py", "background": True})
        if not job.ok:
            return f"the job did not begin: {job!r}"[:400]
        async with asyncio.timeout(_WATCHED_S):
            while not (folder / "ready").exists():
                await asyncio.sleep(0.01)
        for name in (*_PINNED, "hidden/h", "c/mid/.vscode/tasks.json", "d/.git/HEAD"):
            put(folder / name, "")
        put(home.path / "store" / "store.js", "theirs")
        (folder / "linked").mkdir()
        (folder / "linked" / "store.js").hardlink_to(home.path / "store" / "store.js")
        robbed.append(home.path / "store" / "store.js")
        before = {path: path.read_bytes() for path in robbed}
        (folder / "go").touch()
        answered = refused = 0
        try:
            for _ in range(_ROUNDS):
                result = await session.call("bash", {"command": "bash look.sh", "timeout_ms": 20_000})
                if SECRET in said_by(result):
                    return f"a key was read: {result!r}"[:600]
                if changed := [str(path) for path, was in before.items() if path.read_bytes() != was]:
                    return breach(changed, "written")
                answered += result.ok
                refused += result.error_kind == "conflict"
        finally:
            (folder / "stop").touch()
            told: Any = job.data
            await session.call("wait", {"job_id": told["job_id"]})
            shutil.rmtree(home.path / "store")
        return None if answered and refused else f"{answered} calls were answered, and {refused} refused"


async def _ended(home: VictimHome, name: str, change: Callable[[Path], object]) -> str | None:
    """The user's editor or git replaces a mounted-over file while a program runs."""
    path, ready = home.workspace / name, home.workspace / "ready"
    call = asyncio.ensure_future(home.call("bash", command="touch ready; sleep 100", timeout_ms=110_000))
    async with asyncio.timeout(_WATCHED_S):
        while not ready.exists():
            if call.done():
                return f"the program did not run: {call.result()!r}"[:600]
            await asyncio.sleep(0.01)
    ready.unlink()
    change(path)
    try:
        async with asyncio.timeout(_WATCHED_S):
            result = await call
    except TimeoutError:
        call.cancel()
        return f"{name} was replaced, and the program went on"
    if result.error_kind != "conflict" or str(path) not in (result.error_text or ""):
        return f"it was not told that {name} was replaced: {result!r}"[:600]
    return None


def _saved(path: Path) -> None:
    new = path.with_name("new~")
    new.write_bytes(path.read_bytes())
    new.rename(path)


def _backed_up(path: Path) -> None:
    text = path.read_bytes()
    path.rename(path.with_name("old~"))
    path.write_bytes(text)


async def _saved_while_a_program_runs(home: VictimHome) -> str | None:
    for name in (".env", "deploy/server.pem", ".git/config"):
        for change in (_saved, _backed_up):
            if (broken := await _ended(home, name, change)) is not None:
                return broken
            (home.workspace / name).with_name("old~").unlink(missing_ok=True)
    return None


async def _configured_while_a_program_runs(home: VictimHome) -> str | None:
    """By git itself, and with a configuration of Handrail's in the workspace."""
    put(home.workspace / "handrail.toml", "")
    try:
        if (broken := await _ended(home, "handrail.toml", _saved)) is not None:
            return broken
    finally:
        (home.workspace / "handrail.toml").unlink()
    return await _ended(home, ".git/config", lambda path: home.git("config", "user.note", "new"))


async def _saved_before_the_program_begins(home: VictimHome) -> str | None:
    """In a sandbox that is ready and waits for its call."""
    for change in (_saved, _backed_up):
        await home.shell("true")
        await home.shell("true")
        change(home.workspace / ".env")
        said = await home.shell("cat .env; cat < .env")
        (home.workspace / "old~").unlink(missing_ok=True)
        if SECRET in said:
            return f"the file was read: {said!r}"[:400]
    return None


_REACHABLE = """\
lines = [line.split(" ") for line in open("/proc/self/mountinfo")]
plain = lambda path: path.encode().decode("unicode_escape")
points = {plain(line[4]) for line in lines}
shown = [point for point in points if point not in ("/", "/tmp", "/run", "/var")]
def beneath(path, folder):
    return path == folder or path.startswith(folder.rstrip("/") + "/")
for line in lines:
    at = plain(line[3])
    while at != "/":
        at = os.path.dirname(at)
        if any(beneath(at, point) for point in shown):
            continue
        try:
            names = os.listdir(at)
        except OSError:
            continue
        for name in names:
            path = at.rstrip("/") + "/" + name
            if not any(beneath(point, path) for point in points) and not os.path.islink(path) and at not in ("/", "/run", "/var", "/tmp"):
                print("REACHED", path)
"""


CASES: list[Case] = [
    Case(
        "a folder swapped while a sandbox is made",
        "sandbox",
        "a background program swaps a folder for a link, and the next sandbox mounts what it leads to",
        "the call is a conflict, and nothing outside is read or written",
        _swapped_in_the_background,
        slow=True,
    ),
    Case(
        "all that is mounted exchanged while a sandbox is made",
        "sandbox",
        "files, folders, parents and hard links change places with links while the next sandbox is set up",
        "the call is a conflict, and nothing outside is read or written",
        _exchanged_in_the_background,
        slow=True,
    ),
    Case(
        "a hidden or kept file saved while a program runs",
        "sandbox",
        "a mount over a file ends when another file takes its name",
        "the program is ended at once, and the call is a conflict that names the file",
        _saved_while_a_program_runs,
    ),
    Case(
        "a configuration saved while a program runs",
        "sandbox",
        "git config and editors save by rename, which takes the read-only mount off",
        "the program is ended at once, and the call is a conflict that names the file",
        _configured_while_a_program_runs,
    ),
    Case(
        "a hidden file saved before the program begins",
        "sandbox",
        "a sandbox that was made ready has lost its mask",
        "it is not used",
        _saved_before_the_program_begins,
    ),
    python(
        "folders that mountinfo names",
        "sandbox",
        "/proc/self/mountinfo names the state folder and others of this machine",
        "beside the mounts themselves nothing is in them",
        _REACHABLE,
        control=False,
        harmless=True,
    ),
]
