"""The outer sandbox: an isolated machine in which a whole Handrail is attacked.

Nothing of the suite runs a probe anywhere else. The outer sandbox has namespaces of its own, a fake home with keys in
it, a fake internet on its loopback interface, and no file of the machine but programs, this checkout and the
interpreter, all read-only. Whoever starts the suite, what runs inside is a user without rights outside: root gives its
own identity away first. :mod:`tests.attacks.first` is the first program inside, :mod:`tests.attacks.inside` the second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from handrail.sandbox.start.spawn import find_bubblewrap_programs

Mode = Literal["user", "mapped root", "real root"]
MODES: tuple[Mode, ...] = ("user", "mapped root", "real root")
"""As whom the Handrail inside runs: a user, a user whose namespace calls it root, and root itself, stripped of its
capabilities, whom only looks are allowed."""
CHECKOUT = Path(__file__).resolve().parents[2]
HOME = "/home/victim"
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts")
_SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ROOTS_RIGHTS = (
    "SYS_ADMIN",
    "SETUID",
    "SETGID",
    "SETPCAP",
    "SETFCAP",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "SYS_RESOURCE",
)
_RIGHTS_TO_BUILD = ("SYS_ADMIN", "NET_ADMIN", "NET_BIND_SERVICE")
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nvictim:x:{uid}:{gid}:victim:/home/victim:/bin/sh\n",
    "group": "root:x:0:\nvictim:x:{gid}:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "resolv.conf": "nameserver 93.184.216.53\noptions timeout:1 attempts:1\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


class NotApplicable(Exception):
    """This machine, or this user, cannot put something to the test; its text says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one case in one mode."""

    case: str
    state: Literal["held", "broken", "not applicable"]
    detail: str = ""
    ms: int = 0


def identity() -> tuple[int, int]:
    """Return the uid and gid of the outer sandbox: the current user's, or unused ones for root."""
    if os.geteuid() != 0:
        return os.getuid(), os.getgid()
    import pwd

    taken = {entry.pw_uid for entry in pwd.getpwall()}
    free = next(number for number in range(64_321, 1 << 16) if number not in taken)
    return free, free


def run(mode: Mode, suite: str, cases: Sequence[str] = (), *, timeout_s: float = 900.0) -> list[Outcome]:
    """Start the outer sandbox with the Handrail to attack, and return the outcome of each case.

    :param suite: what to run inside, see :mod:`tests.attacks.inside`
    :raises NotApplicable: where there can be no such sandbox
    :raises RuntimeError: when it ended in any other way than with an answer to every case
    """
    lines = list(_lines(mode, {"suite": suite, "cases": list(cases), "mode": mode}, timeout_s))
    return [Outcome(**line) for line in lines]


def _lines(mode: Mode, order: Mapping[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
    if (why := unavailable(mode)) is not None:
        raise NotApplicable(why)
    done = _started(mode, order, timeout_s)
    said = [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith("{")]
    if done.returncode != 0 or not said or said[-1] != {"end": True}:
        errors = done.stderr.decode("utf-8", "replace")[-4000:]
        raise RuntimeError(f"the outer sandbox ended with {done.returncode} after {len(said)} answers: {errors}")
    yield from said[:-1]


@cache
def unavailable(mode: Mode) -> str | None:
    """Why there cannot be an outer sandbox in this mode, or None: found out by starting one."""
    if not sys.platform.startswith("linux"):
        return "the sandbox is built from Linux namespaces"
    if mode == "real root" and os.geteuid() != 0:
        return "only root can try what root may do"
    if next(find_bubblewrap_programs(), None) is None:
        return "bubblewrap is not installed"
    try:
        done = _started(mode, {"suite": "none", "cases": [], "mode": mode}, 60.0)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the outer sandbox cannot be started: {error}"
    if done.returncode == 0:
        return None
    said = done.stderr.decode("utf-8", "replace").strip().splitlines() or [f"it ended with {done.returncode}"]
    return f"no sandbox can be nested here: {said[-1][:300]}"


def _started(mode: Mode, order: Mapping[str, Any], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    uid, gid = (0, 0) if mode == "real root" else identity()
    as_root = os.geteuid() == 0
    plan = {
        **order,
        "host": {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES},
        "uid": uid,
        "gid": gid,
        "as_root": as_root,
        "home": HOME,
    }
    with ExitStack() as stack:
        made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="handrail-outer-")))
        made.chmod(0o755)
        for name, text in _ETC.items():
            (made / name).write_text(text.format(uid=uid, gid=gid))
        return subprocess.run(
            [next(find_bubblewrap_programs()), *_options(made, as_root=as_root), "--", *_first(plan)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={},
            cwd="/",
        )


def _first(plan: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-I", str(CHECKOUT / "tests/attacks/first.py"), json.dumps(plan)]


def _options(made: Path, *, as_root: bool) -> list[str]:
    options = [*("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")]
    options += [*("--die-with-parent", "--new-session", "--hostname", "outer", "--clearenv"), "--cap-drop", "ALL"]
    for name in (*(_ROOTS_RIGHTS if as_root else ()), *_RIGHTS_TO_BUILD):
        options += ["--cap-add", f"CAP_{name}"]
    if not as_root:  # whoever starts it is root of its namespace until the network stands
        options += ["--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "ALL"]
    options += ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM_LINKS:
        path = Path("/") / name
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    options += ["--ro-bind", "/etc", "/etc"]
    for name in _ETC:
        if (real := Path("/etc", name).resolve()).exists():
            options += ["--ro-bind", str(made / name), str(real)]
    # As root a /proc made by bubblewrap has parts of it covered, and then no further one can be mounted inside. The
    # first program inside puts an uncovered one of its own namespace in the place of the machine's.
    options += ["--bind", "/proc", "/proc"] if as_root else ["--proc", "/proc"]
    options += ["--dev", "/dev", "--perms", "1777", "--size", str(1 << 30), "--tmpfs", "/tmp"]
    options += ["--dir", "/run", "--dir", "/var", "--perms", "0755", "--size", str(1 << 30), "--tmpfs", HOME]
    for path in _mounted():
        for above in reversed(Path(path).parents[:-1]):  # bubblewrap itself makes them for its own user only
            options += ["--perms", "0755", "--dir", str(above)]
        options += ["--ro-bind", path, path]
    for name, value in _environment().items():
        options += ["--setenv", name, value]
    return [*options, "--chdir", HOME]


def _mounted() -> Iterator[str]:
    """The interpreter and the checkout's code: what a Handrail that is attacked is made of."""
    for path in {str(Path(sys.base_prefix).resolve()), os.path.realpath(sys.executable).rpartition("/bin/")[0]}:
        if path and not path.startswith("/usr"):
            yield path
    yield os.path.abspath(sys.prefix)
    for name in ("src", "tests", "pyproject.toml"):
        yield str(CHECKOUT / name)


def _environment() -> dict[str, str]:
    return {
        "PATH": f"{Path(sys.prefix).absolute()}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(CHECKOUT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "NO_COLOR": "1",
        "GIT_CONFIG_NOSYSTEM": "1",
    }
