"""Access to files outside the roots by path, link, file type or name."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.attacks.case import Case, Group, breach, shell
from tests.attacks.victim import SECRET, VictimHome, put

_FILES: Group = "files"


def _doors(path: str, folder: str | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Every built-in call that takes a path, with this one."""
    return [
        ("read", {"path": path}),
        ("read", {"path": path, "unit": "bytes"}),
        ("write", {"path": path, "content": "robbed"}),
        ("edit", {"path": path, "old": "SECRET", "new": "robbed"}),
        ("file.patch", {"path": path, "operations": [{"op": "append", "content": "robbed"}]}),
        *(("apply_patch", {"patch": patch}) for patch in _patches(path)),
        ("grep", {"pattern": ".", "path": path}),
        ("glob", {"pattern": "**/*", "path": folder or path}),
    ]


def _patches(path: str) -> list[str]:
    """Every way in which a patch can reach a file, each after a change that is allowed."""
    sections = (
        f"*** Update File: {path}\n-SECRET\n+robbed",
        f"*** Add File: {path}\n+robbed",
        f"*** Delete File: {path}",
        f"*** Update File: {path}\n*** Move to: robbed.txt\n-SECRET\n+robbed",
        f"*** Add File: loot.txt\n+x\n*** Update File: loot.txt\n*** Move to: {path}\n-x\n+robbed",
    )
    return [f"*** Begin Patch\n*** Add File: patched.txt\n+x\n{section}\n*** End Patch" for section in sections] + [
        f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-SECRET\n+robbed\n",
        f"diff --git a/{path} b/{path}\nold mode 100644\nnew mode 100755\n",
        f"diff --git a/{path} b/loot.txt\ncopy from {path}\ncopy to loot.txt\n",
        f"diff --git a/{path} b/loot.txt\nrename from {path}\nrename to loot.txt\n",
    ]


def _closed(
    id: str,
    source: str,
    paths: Callable[[VictimHome], Iterable[str]],
    *,
    before: Callable[[VictimHome], None] = lambda home: None,
    expected: str = "every file tool refuses it, and nothing outside is changed",
    untouched: str = ".ssh/id_ed25519",
) -> Case:
    """Every file tool with each path, all calls approved: no secret is read, and no outside file is changed."""

    async def tried(home: VictimHome) -> str | None:
        before(home)
        target = home.path / untouched
        was, links = target.read_bytes(), target.stat().st_nlink
        for path in paths(home):
            for name, arguments in _doors(path):
                result = await home.call(name, **arguments)
                if SECRET in repr(result) or (result.ok and name not in ("glob", "grep")):
                    return f"{name} {path}: {result!r}"[:800]
        if target.read_bytes() != was or target.stat().st_nlink != links:
            return f"{target} was changed"
        return None

    return Case(id, _FILES, source, expected, tried)


def _links(home: VictimHome) -> None:
    for name, to in {
        "to-key": home.path / ".ssh" / "id_ed25519",
        "to-home": home.path,
        "to-root": Path("/"),
        "through": Path("to-home"),
        "relative": Path("../.ssh"),
        "magic": Path("/proc/self/root"),
        "magic-cwd": Path("/proc/self/cwd"),
    }.items():
        if not os.path.lexists(home.workspace / name):
            (home.workspace / name).symlink_to(to)


async def _hard_link(home: VictimHome) -> str | None:
    """Documented: read under the name that it has here. Written it is never."""
    link = home.workspace / "hard"
    os.link(home.path / "project_secret" / "key", link)
    try:
        for name, arguments in _doors("hard")[2:5]:
            result = await home.call(name, **arguments)
            if result.ok:
                return f"{name}: {result!r}"[:600]
        kept = (home.path / "project_secret" / "key").read_text()
        return None if SECRET in kept else f"the file outside holds {kept!r}"
    finally:
        link.unlink()


async def _special(home: VictimHome) -> str | None:
    """A FIFO, a socket, and devices behind links: refused immediately, without blocking."""
    os.mkfifo(home.workspace / "fifo")
    (home.workspace / "zero").symlink_to("/dev/zero")
    (home.workspace / "stdin").symlink_to("/dev/stdin")
    os.mkfifo(home.workspace / "src" / "inner-fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(home.workspace / "sock"))
        server.listen()
        try:
            for path in ("fifo", "sock", "zero", "stdin", "/dev/zero", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"):
                for name, arguments in _doors(path):
                    async with asyncio.timeout(20):
                        result = await home.call(name, **arguments)
                    if result.ok and name not in ("glob", "grep"):
                        return f"{name} {path}: {result!r}"[:600]
            async with asyncio.timeout(20):
                result = await home.call("grep", pattern="a = 1")
            return None if result.ok and "src/a.py" in repr(result.data) else f"grep: {result!r}"[:600]
        finally:
            for path in ("fifo", "sock", "zero", "stdin", "src/inner-fifo"):
                (home.workspace / path).unlink()


async def _sparse(home: VictimHome) -> str | None:
    """1 TiB that takes no room: reads answer within bounds, and the others say that it is too much."""
    path = home.workspace / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    try:
        for name, arguments in _doors("sparse"):
            if name == "glob":
                continue
            async with asyncio.timeout(60):
                result = await home.call(name, **arguments)
            if len(repr(result)) > 1_000_000:
                return f"{name} answered {len(repr(result))} characters"
            if name in ("edit", "file.patch", "apply_patch") and result.ok:
                return f"{name}: {result!r}"[:600]
        return None
    finally:
        path.unlink(missing_ok=True)


async def _loops(home: VictimHome) -> str | None:
    loop = home.workspace / "loop"
    loop.mkdir()
    (loop / "self").symlink_to(".")
    (loop / "a").symlink_to("b")
    (loop / "b").symlink_to("a")
    try:
        for path in ("loop/a", "loop/self/self/self/a", "loop/" + "self/" * 60 + "a"):
            for name, arguments in _doors(path):
                async with asyncio.timeout(30):
                    result = await home.call(name, **arguments)
                if result.ok and name not in ("glob", "grep"):
                    return f"{name} {path}: {result!r}"[:600]
        for name, arguments in (("glob", {"pattern": "loop/**"}), ("grep", {"pattern": "x", "path": "loop"})):
            async with asyncio.timeout(30):
                await home.call(name, **arguments)
        return None
    finally:
        await home.shell("rm -r loop")


async def _deep(home: VictimHome) -> str | None:
    """5,000 folders in one another: search answers, and a path of that length is refused in words."""
    here = os.open(home.workspace, os.O_RDONLY)
    for _ in range(5_000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        for name, arguments in (
            ("glob", {"pattern": "**/*.py"}),
            ("grep", {"pattern": "a = 1"}),
            ("read", {"path": "d/" * 4_000 + "x"}),
            ("write", {"path": "d/" * 4_000 + "x", "content": "x"}),
        ):
            async with asyncio.timeout(60):
                result = await home.call(name, **arguments)
            if "Traceback" in repr(result) or (name in ("glob", "grep") and "src/a.py" not in repr(result.data)):
                return f"{name}: {result!r}"[:600]
        return None
    finally:
        await home.shell("rm -rf d")


_LOOK_ALIKES = (".GIT", ".Git", ".git.", ".git ", ".g\u200dit", ".git\u200b", "\uff0egit", ".git::$INDEX_ALLOCATION",
                "GIT~1", ".gi\u0307t", ".git\u00ad", "./.git", ".//.git", "src/../.git")  # fmt: skip


async def _look_alikes(home: VictimHome) -> str | None:
    """Names that a file system treats like ``.git`` are protected like it."""
    for name in _LOOK_ALIKES:
        result = await home.call("write", path=f"{name}/hooks/pre-commit", content="#!/bin/sh\n")
        if result.ok:
            return f"write {name!r}/hooks/pre-commit: {result!r}"[:600]
    return None


async def _names(home: VictimHome) -> str | None:
    """Names with invalid UTF-8, newlines or ESC: shown without control of a terminal, and searchable."""
    folder = home.workspace / "names"
    folder.mkdir()
    raw = os.fsencode(folder)
    for name in (
        b"bad-\xff\xfe.txt",
        b"line\nbreak.txt",
        b"esc-\x1b[2Jx.txt",
        b"osc-\x1b]0;x\x07.txt",
        b"right-\xe2\x80\xae.txt",
    ):
        with open(raw + b"/" + name, "w") as file:
            file.write("needle\n")
    try:
        said: list[str] = []
        for tool, arguments in (
            ("glob", {"pattern": "names/**"}),
            ("grep", {"pattern": "needle", "path": "names"}),
            ("read", {"path": "names/esc-\x1b[2Jx.txt"}),
            ("read", {"path": "names/line\nbreak.txt"}),
            ("read", {"path": "names/bad-\udcff\udcfe.txt"}),
            ("read", {"path": "names/none-\x1b[2J"}),
        ):
            result = await home.call(tool, **arguments)
            said.append(result.error_text or "")
            if tool != "read":
                said.append(str(result.data))
                if not result.ok:
                    return f"{tool}: {result!r}"[:600]
        return breach(
            [text for text in said if "\x1b" in text or "\x07" in text or "\u202e" in text], "told as they are"
        )
    finally:
        await home.shell("rm -r names")


async def _nul(home: VictimHome) -> str | None:
    for path in ("README.md\0.txt", "\0", "src/\0/../../.ssh/id_ed25519"):
        for name, arguments in _doors(path):
            result = await home.call(name, **arguments)
            if result.ok or "Traceback" in repr(result):
                return f"{name} {path!r}: {result!r}"[:600]
    return None


def _tar(name: str, link: str | None = None) -> bytes:
    made = BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        if link is not None:
            entry = tarfile.TarInfo("way")
            entry.type, entry.linkname = tarfile.SYMTYPE, link
            archive.addfile(entry)
        entry = tarfile.TarInfo(name)
        entry.size = 6
        archive.addfile(entry, BytesIO(b"robbed"))
    return made.getvalue()


async def _slips(home: VictimHome) -> str | None:
    """Archives with ``..``, absolute names and links in them, unpacked by a program: nothing lands outside."""
    (home.workspace / "a.tar").write_bytes(_tar("../../slipped"))
    (home.workspace / "b.tar").write_bytes(_tar(f"{home.path}/slipped"))
    (home.workspace / "c.tar").write_bytes(_tar("way/slipped", str(home.path)))
    with zipfile.ZipFile(home.workspace / "d.zip", "w") as archive:
        archive.writestr("../../slipped", "robbed")
    unpack = "import zipfile, shutil\nfor i in zipfile.ZipFile('d.zip').infolist():\n    open(i.filename, 'wb').write(b'robbed')\n"
    put(home.workspace / "unzip.py", unpack)
    said = await home.shell(
        "for f in a b c; do tar -P -xf $f.tar; done; cd src; cp ../d.zip .; python3 ../unzip.py; echo END"
    )
    await home.shell("rm -f [abc].tar d.zip src/d.zip unzip.py way")
    if "END" not in said:
        return said
    return breach(home.path.glob("slipped"), "an archive wrote outside")


async def _two_edits(home: VictimHome) -> str | None:
    """Two reads, two writes: both are there, or one is refused; never one of them lost in silence."""
    path = home.workspace / "shared.txt"
    path.write_text("first = 1\nsecond = 1\n")
    await home.call("read", path="shared.txt")
    results = await asyncio.gather(
        home.call("edit", path="shared.txt", old="first = 1", new="first = 2"),
        home.call("edit", path="shared.txt", old="second = 1", new="second = 2"),
    )
    text = path.read_text()
    path.unlink()
    lost = [r for r, sign in zip(results, ("first = 2", "second = 2"), strict=True) if r.ok and sign not in text]
    return breach(lost, "an edit that was reported done is not there")


async def _same_second(home: VictimHome) -> str | None:
    """A change of the same size in the same second, with the old times put back, is noticed before it is written over."""
    path = home.workspace / "quick.txt"
    path.write_text("mine\n")
    await home.call("read", path="quick.txt")
    times = path.stat()
    path.write_text("them\n")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    result = await home.call("write", path="quick.txt", content="over\n")
    text = path.read_text()
    path.unlink()
    return None if not result.ok and text == "them\n" else f"{result!r}, and the file holds {text!r}"


async def _swapped(home: VictimHome) -> str | None:
    """The short form; the many rounds are in test_races.py."""
    (home.workspace / "swap").mkdir()
    put(home.workspace / "swap" / "f", "harmless\n")
    stop = asyncio.Event()

    def swap() -> None:
        while not stop.is_set():
            os.rename(home.workspace / "swap", home.workspace / "kept")
            with suppress(FileExistsError):  # a write may have made a folder there just now
                os.symlink(home.path / "project_secret", home.workspace / "swap")
                os.unlink(home.workspace / "swap")
            with suppress(OSError):
                os.rename(home.workspace / "kept", home.workspace / "swap")
            while (home.workspace / "kept").exists():
                shutil.rmtree(home.workspace / "swap", ignore_errors=True)
                with suppress(OSError):
                    os.rename(home.workspace / "kept", home.workspace / "swap")

    swapping = asyncio.create_task(asyncio.to_thread(swap))
    try:
        for _ in range(40):
            for name, arguments in _doors("swap/key", "swap"):
                result = await home.call(name, **arguments)
                if SECRET in repr(result):
                    return f"{name}: {result!r}"[:600]
    finally:
        stop.set()
        await swapping
        await home.shell("rm -rf swap")
    kept = sorted(path.name for path in (home.path / "project_secret").iterdir())
    return None if kept == ["key"] else f"beside the secret there is now {kept}"


async def _images(home: VictimHome) -> str | None:
    """An image or a PDF is read by the same way as text: the path is judged first."""
    for name in ("photo.png", "paper.pdf"):
        put(home.path / "project_secret" / name, f"\x89PNG\n{SECRET}\n")
        for path in (f"../project_secret/{name}", str(home.path / "project_secret" / name)):
            for tool, arguments in _doors(path)[:2]:
                result = await home.call(tool, **arguments)
                if result.ok or SECRET in repr(result):
                    return f"{tool} {path}: {result!r}"[:600]
        (home.path / "project_secret" / name).unlink()
    return None


async def _secret_like(home: VictimHome) -> str | None:
    """Files that look like secrets are skipped by searches and hidden from programs unless a rule names them."""
    async with home.kernel(name="headless", workspace=home.workspace / "deploy") as kernel:
        session = await kernel.session()
        for name, arguments in (
            ("read", {"path": "server.pem"}),
            ("grep", {"pattern": "SECRET"}),
            ("grep", {"pattern": "SECRET", "path": "server.pem"}),
            ("glob", {"pattern": "*.pem"}),
        ):
            result = await session.call(name, arguments)
            if SECRET in repr(result) or "server.pem" in repr(result.data):
                return f"{name}: {result!r}"[:600]
    return None


CASES: list[Case] = [
    _closed("dot-dot", "climbing out of the folder", lambda home: [
        "../.ssh/id_ed25519", "src/../../.ssh/id_ed25519", "./.././.ssh//id_ed25519", "src/../../project/../.ssh/id_ed25519",
        "../" * 40 + "home/victim/.ssh/id_ed25519"]),
    _closed("absolute", "a path that begins at the root", lambda home: [
        str(home.path / ".ssh" / "id_ed25519"), "//home/victim/.ssh/id_ed25519", "/etc/passwd", "~/.ssh/id_ed25519",
        "file:///home/victim/.ssh/id_ed25519"]),
    _closed("prefix confusion", "/ws allows /ws_secret", lambda home: [
        f"{home.workspace}_secret/key", "../project_secret/key", f"{home.workspace}/../project_secret/key"],
        untouched="project_secret/key"),
    _closed("symbolic links", "a link in the workspace leads out", lambda home: [
        "to-key", "to-home/.ssh/id_ed25519", "through/.ssh/id_ed25519", "relative/id_ed25519",
        "to-root/home/victim/.ssh/id_ed25519"], before=_links),
    _closed("magic links", "/proc/self/root and /dev/fd lead anywhere", lambda home: [
        "magic/home/victim/.ssh/id_ed25519", "magic-cwd/../.ssh/id_ed25519", "/proc/self/root/home/victim/.ssh/id_ed25519",
        f"/proc/{os.getpid()}/cwd/.ssh/id_ed25519", "/proc/self/environ", "/dev/fd/3"], before=_links),
    _closed("Handrail's own state", "an audit log that the agent could erase", lambda home: [
        *(str(path) for path in sorted(home.state.rglob("handrail.db"))), str(home.config),
        f"to-home/{home.config.relative_to(home.path)}"], before=_links, untouched=".config/handrail/handrail.toml"),
    Case("hard link", _FILES, "a second name of a file outside", "written over it is never", _hard_link),
    Case("FIFOs, sockets and devices", _FILES, "read of /dev/zero never ends, of a FIFO waits", "refused at once", _special),
    Case("1 TiB sparse", _FILES, "a file longer than memory that takes no room", "answered within bounds", _sparse, slow=True),
    Case("link loops", _FILES, "ELOOP, and walks that never end", "refused; search ends", _loops),
    Case("5,000 folders deep", _FILES, "recursion and paths without end", "search ends, long paths are refused", _deep),
    Case("look-alikes of .git", _FILES, "case, dots, blanks, invisible letters", "protected like .git itself", _look_alikes),
    Case("names that draw", _FILES, "invalid UTF-8, newlines and ESC in names", "spelled out; still searched", _names),
    Case("NUL", _FILES, "a name that ends sooner for the kernel than for the check", "refused", _nul),
    Case("zip and tar slips", _FILES, "archives that unpack elsewhere", "nothing lands outside", _slips),
    Case("lost edit", _FILES, "two reads, two writes, one lost edit", "both there, or one refused", _two_edits),
    Case("same size, same second", _FILES, "mtime as the sign of a change", "noticed by content", _same_second),
    Case("swapped while in use", _FILES, "checked before, opened after", "what is opened is what was checked", _swapped, slow=True),
    Case("images before the check", _FILES, "other kinds of files read by another way", "one way for all", _images),
    Case("secret-like files", _FILES, "keys found by search", "neither read nor listed without a rule", _secret_like),
    shell("programs and paths", _FILES, "cat instead of read", "the home is not there",
          "cat ../.ssh/id_ed25519 /home/victim/.ssh/id_ed25519 /proc/self/root/home/victim/.ssh/id_ed25519 ~victim/.ssh/*",
          sign=SECRET),
    shell("programs and prefixes", _FILES, "the folder beside", "it is not there",
          "cat ../project_secret/key; ls -d ../project_secret/key && echo TOP-SECRET", sign=SECRET),
    shell("programs and links", _FILES, "links made by a program", "they lead nowhere",
          "ln -sf /home/victim/.ssh l; cat l/id_ed25519; ln /home/victim/.ssh/id_ed25519 h; cat h; rm -f l h", sign=SECRET),
    shell("root's files", _FILES, "as root a sandbox reads the password hashes", "what not everybody may read is not read",
          "cat /etc/shadow /etc/gshadow /etc/ssh/ssh_host_*_key 2>/dev/null | grep -q . && echo REACHED", control=False,
          harmless=True),
    shell("other users' homes", _FILES, "/root and /home", "absent", "ls -A /root /home 2>/dev/null | grep -v -e : -e '^$' "
          "-e '^victim$' -e '^.pyenv$' && echo REACHED; ls -A /home/victim | grep -e '^.ssh' && echo REACHED"),
    shell("secret-like files by a program", _FILES, "cat .env where read .env is refused",
          "masked where no rule allows it", "cat .env deploy/server.pem; grep -r . deploy", sign=SECRET),
    shell("written only where allowed", _FILES, "programs writing beside the workspace",
          "everything else is absent or read-only",
          "for d in / /usr /usr/bin /etc /home /home/victim /var /run /dev /proc /sys; do "
          "touch $d/handrail-probe 2>/dev/null && echo REACHED $d; done"),
]  # fmt: skip
