"""Templates of sandboxes: bubblewrap makes the mounts of a launch plan once, and each sandbox gets a copy of them.

The first process of a template (``template.pl``) stays in the mounts that bubblewrap made. For each sandbox it makes a
child in new namespaces for mounts, processes, IPC, host name, users and, unless the session shares one, the network. The
child gets its own /proc, /tmp, /dev/shm and /dev/pts, gives up every right over its namespaces, takes the filter of system
calls, and continues as the launcher. Its mounts are compared with the plan like those of any other sandbox.

A template is used only for the plan that it was made for. If a mount in it ends, it makes no more sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from handrail.contract.errors import ToolError
from handrail.sandbox.start import launcher_messages, sandboxed_process
from handrail.sandbox.view import mount_comparison
from handrail.sandbox.view.mount_comparison import ExpectedMounts

MAX_TEMPLATES = 4
"""The limit of templates of one provider. Each takes about 4 MB."""
MAX_IDLE_S = 60.0
"""A template that no sandbox was made from for this time ends."""
MAX_AGE_S = 600.0
"""A template makes no more sandboxes after this time."""
_RETRY_S = 60.0
"""The time after a failure in which no template of the kind is tried again."""
_MOST_NUMBERS = 200
"""The limit of numbers in one request, which template.pl reads as one message. More descriptors need a bubblewrap."""
_START_S = 60.0
"""The time that a template has to become ready, on a machine that is very busy."""

_NAMES = (
    *("clone", "mount", "umount2", "unshare", "recvmsg", "prctl", "seccomp", "dup3", "fcntl", "fchdir", "capset"),
    *("setsid", "open_tree", "move_mount", "close_range"),
)
SYSTEM_CALLS: Mapping[str, tuple[int, ...]] = {
    "x86_64": (56, 165, 166, 272, 47, 157, 317, 292, 72, 81, 126, 112, 428, 429, 436),
    "aarch64": (220, 40, 39, 97, 212, 167, 277, 24, 25, 50, 91, 157, 428, 429, 436),
}
"""The numbers of these system calls by machine. Other machines have no templates."""
_EVALUATED = re.compile(
    r'^ *eval\(qq\{#line 1 "(?P<name>describer|watcher)\.pl".*?(?: if (?P<condition>@\w+))?;$', re.MULTILINE
)
_PRIVATE = ("/tmp", "/dev/shm")  # noqa: S108 - the sandbox's
_VALUES = {
    "--perms": 1,
    "--size": 1,
    "--dir": 1,
    "--symlink": 2,
    "--tmpfs": 1,
    "--proc": 1,
    "--dev": 1,
    "--remount-ro": 1,
}


@dataclass(frozen=True, slots=True)
class TemplateMounts:
    """The mounts of a template, and what each of its sandboxes mounts in addition.

    :param options: bubblewrap's mount options for the template
    :param sealed: whether /proc is read-only as a whole
    :param sizes: the bytes of the private /tmp and /dev/shm
    :param system: mount points directly on /proc, which move onto the sandbox's own
    :param inner: mount points directly on /tmp, which move onto the sandbox's own
    """

    options: tuple[str, ...]
    sealed: bool
    sizes: tuple[int, int]
    system: tuple[str, ...]
    inner: tuple[str, ...]


@lru_cache(maxsize=64)
def derive_template_mounts(options: tuple[str, ...], table: ExpectedMounts) -> TemplateMounts | None:
    """Return the mounts of a template for sandboxes with these options; None if there can be no template.

    Every file system that bubblewrap makes for a sandbox is either made for each sandbox, or read-only in the template:
    sandboxes of one template share it.

    :param table: the mounts that follow from the options
    """
    points = [mount.point for mount in table.mounts]
    if any(points.count(point) != 1 for point in ("/proc", *_PRIVATE, "/dev", "/")):
        return None
    found: list[str] = []
    sizes: dict[str, int] = {}
    sealed = False
    at = 0
    while at < len(options):
        option = options[at]
        size = 3 if option in ("--bind", "--ro-bind") else 1 + _VALUES[option]
        words = options[at : at + size]
        at += size
        if option == "--tmpfs" and words[1] in _PRIVATE:
            if found[-2:-1] != ["--size"] or not found[-1].isdigit():
                return None
            sizes[words[1]] = int(found[-1])
            del found[-4:]  # --perms 1777 --size NUMBER
            found += ("--dir", words[1]) if words[1] != "/dev/shm" else ()  # noqa: S108 - bubblewrap makes it
        elif words == ("--remount-ro", "/proc"):
            sealed = True
        else:
            found += words
    on = mount_comparison.find_points_on(table, ("/proc", *_PRIVATE))
    if sizes.keys() != set(_PRIVATE) or on["/dev/shm"]:  # noqa: S108
        return None
    shared = [
        mount.point
        for mount in table.mounts
        if mount.content == "+" and not mount.read_only and mount.point not in ("/proc", "/", *_PRIVATE)
    ]
    found += (word for point in shared for word in ("--remount-ro", point))
    if not any(mount.point == "/" and mount.read_only for mount in table.mounts):
        return None
    return TemplateMounts(tuple(found), sealed, (sizes["/tmp"], sizes["/dev/shm"]), on["/proc"], on["/tmp"])  # noqa: S108


def build_template_argv(
    mounts: TemplateMounts, system_calls: bytes, start: str, user: tuple[int, int], requests: int, *, own_network: bool
) -> list[str]:
    """Return the program of a template and its arguments.

    :param system_calls: the filter that each of its sandboxes takes; empty for none
    :param start: the folder in which the launcher of each sandbox begins
    :param user: the user and group id of its sandboxes' programs
    :param requests: the number of the socket for requests
    """
    numbers = zip(_NAMES, SYSTEM_CALLS[platform.machine()], strict=True)
    return [
        *(launcher_messages.PERL, "-f", "-e", _read_program(), "--", launcher_messages.read_source("mount_changes.pl")),
        *(str(requests), " ".join(f"{name} {number}" for name, number in numbers), system_calls.hex()),
        *map(str, user),
        *("1" if own_network else "", "1" if mounts.sealed else "", *map(str, mounts.sizes), start),
        *(str(len(mounts.system)), *mounts.system, *mounts.inner),
    ]


def build_namespace_options(*, own_network: bool) -> list[str]:
    """Return bubblewrap's options for the namespaces of a template.

    Its process is root in its user namespace, because bubblewrap takes the rights over the mounts from any other user. Its
    sandboxes have no capability there.
    """
    names = "CAP_SYS_ADMIN", "CAP_SETFCAP", *(("CAP_NET_ADMIN",) if own_network else ())
    options = ["--uid", "0", "--gid", "0", *(word for name in names for word in ("--cap-add", name))]
    return options if own_network else [*options, "--share-net"]


def can_have_templates() -> bool:
    """Return whether the program of a template can run on this machine."""
    known = platform.machine() in SYSTEM_CALLS and sys.maxsize > 1 << 32 and hasattr(socket, "SO_PASSCRED")
    return known and launcher_messages.find_perl_launcher() is not None


@lru_cache(maxsize=1)
def _read_program() -> str:
    """Return the text of a template's program with everything that its sandboxes run, to be compiled once."""

    def insert(found: re.Match[str]) -> str:
        condition = found["condition"] or "1"
        return f"if ({condition}) {{\n{launcher_messages.read_source(found['name'] + '.pl')}\n}}"

    launcher = _EVALUATED.sub(insert, launcher_messages.read_source("launcher.pl"))
    return f"{launcher_messages.read_source('template.pl')}\n{launcher}"


class SandboxTemplate:
    """A resident process that makes sandboxes. Belongs to one event loop; owns the socket.

    :param pid: the process id of its bubblewrap, a child of this process
    :param requests: the socket for requests; its other end is the template's
    """

    def __init__(self, pid: int, requests: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._requests = requests.detach()  # a copy of this process must not close the number again
        self._is_open = True
        self._first_pid = 0
        self._in_use = 0
        self._answer: asyncio.Future[bool] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self.made_at = self.used_at = self._loop.time()
        with self._use_socket() as ours:
            ours.setblocking(False)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sandboxed_process.close_after_fork(self._requests)
        self._loop.add_reader(self._requests, self._read)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that it was started on."""
        return self._loop

    @property
    def first_process_pid(self) -> int:
        """The process id of its resident process on this machine."""
        return self._first_pid

    @property
    def is_usable(self) -> bool:
        """Whether sandboxes can be made from it."""
        if self._is_open and self._first_pid:
            self._read()  # it closes the socket as soon as one of its mounts ends
        return self._is_open and self._first_pid > 0

    @property
    def is_idle(self) -> bool:
        """Whether no sandbox that was made from it is left."""
        return not self._in_use

    async def wait_until_ready(self) -> bool:
        """Wait until it has made a first sandbox as a trial; return False if that failed."""
        await asyncio.wait({self._answer}, timeout=_START_S)
        return self._answer.done() and self._answer.result() and self._is_open

    async def wait_until_ended(self) -> None:
        """Wait until its processes have ended."""
        await asyncio.shield(self._ended)

    def request_sandbox(self, descriptors: Mapping[int, int], own: Sequence[int]) -> bool:
        """Request a sandbox; return False if the template takes no request.

        :param descriptors: number in the sandbox to descriptor here
        :param own: the numbers of channel, letter and lifeline
        """
        others = [number for number in sorted(descriptors) if number > 2 and number not in own]
        numbers = [*own, len(descriptors), *descriptors, *others]
        if len(numbers) > _MOST_NUMBERS:
            return False
        try:
            with self._use_socket() as ours:
                socket.send_fds(ours, [struct.pack(f"={len(numbers)}i", *numbers)], [*descriptors.values()])
        except OSError:
            self.retire()
            return False
        self.used_at = self._loop.time()
        self._in_use += 1
        return True

    def note_sandbox_end(self) -> None:
        """Note that a sandbox made from it has ended."""
        self._in_use -= 1

    def retire(self) -> None:
        """Make no more sandboxes. The resident process ends with its last sandbox."""
        if self._is_open:
            self._is_open = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._requests)
            sandboxed_process.keep_after_fork(self._requests)
            os.close(self._requests)
        if not self._answer.done() and not self._loop.is_closed():
            self._answer.set_result(False)

    def reap_after_loop(self) -> None:
        """Reap it if it has ended after its event loop was closed."""
        if self._pidfd >= 0 and sandboxed_process.has_ended(self._pidfd):
            self._reap()

    @contextlib.contextmanager
    def _use_socket(self) -> Generator[socket.socket]:
        """Use the socket by its number, which stays open."""
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=self._requests)
        try:
            yield ours
        finally:
            ours.detach()

    def _read(self) -> None:
        try:
            with self._use_socket() as ours:
                text, rights, _, _ = ours.recvmsg(1 << 12, 64)
        except BlockingIOError:
            return
        except OSError:
            text, rights = b"", []
        if text != b"r":
            self.retire()
            return
        self._first_pid = sandboxed_process.find_sender(rights)
        if not self._answer.done():
            self._answer.set_result(self._first_pid > 0)

    def _reap(self) -> None:
        descriptor, self._pidfd = self._pidfd, -1
        if not self._loop.is_closed():
            self._loop.remove_reader(descriptor)
            self.retire()
            self._ended.set_result(None)
        with contextlib.suppress(ChildProcessError):  # an embedding program reaps all children itself
            os.waitpid(self._pid, os.WNOHANG)
        os.close(descriptor)
        _RETIRED.discard(self)


_RETIRED: set[SandboxTemplate] = set()
"""Templates that make no more sandboxes and whose processes have not been reaped."""


class SandboxTemplates:
    """The templates of one sandbox provider, by the plan and network that they were made for."""

    def __init__(self) -> None:
        self._made: dict[object, tuple[SandboxTemplate, str]] = {}
        """Each with the scratch folder of its session, the least recently used first."""
        self._failed: dict[object, float] = {}
        self._starting: set[object] = set()
        self._generation = 0
        """Grows with each :meth:`retire`: a template that was started before is not used."""

    @property
    def count(self) -> int:
        """The number of templates from which sandboxes can be made."""
        return sum(template.is_usable for template, _ in self._made.values())

    def find(self, key: object) -> SandboxTemplate | None:
        """Return a template that can make the sandboxes of this key; None if there is none."""
        template, scratch = self._made.pop(key, (None, ""))
        if template is None:
            return None
        loop = asyncio.get_running_loop()
        if template.loop is not loop or not template.is_usable or loop.time() - template.made_at > MAX_AGE_S:
            _retire(template)
            return None
        self._made[key] = template, scratch
        return template

    async def ensure(self, key: object, scratch: str, start: Callable[[], Awaitable[SandboxTemplate]]) -> None:
        """Make a template for this key, unless there is one or it failed a moment ago."""
        loop = asyncio.get_running_loop()
        if key in self._starting or self.find(key) is not None:
            return
        if loop.time() - self._failed.get(key, float("-inf")) < _RETRY_S:
            return
        for left in [one for one in _RETIRED if one.loop.is_closed()]:
            left.reap_after_loop()
        self._starting.add(key)
        generation = self._generation
        try:
            template = await start()
            _RETIRED.add(template)  # until it is ready
            is_ready = await template.wait_until_ready()
        except (ToolError, OSError):
            is_ready, template = False, None
        finally:
            self._starting.discard(key)
        if template is None or not is_ready:
            self._failed = {**dict(list(self._failed.items())[-MAX_TEMPLATES:]), key: loop.time()}
        elif generation == self._generation:
            _RETIRED.discard(template)
            self._made[key] = template, scratch
            loop.call_later(MAX_IDLE_S, self._expire, key, template)
            while len(self._made) > MAX_TEMPLATES:
                _retire(self._made.pop(next(iter(self._made)))[0])
            return
        if template is not None:
            template.retire()

    def _expire(self, key: object, template: SandboxTemplate) -> None:
        if (held := self._made.get(key)) is None or held[0] is not template:
            return
        rest = template.used_at + MAX_IDLE_S - template.loop.time()
        if rest > 0 and template.is_usable:
            template.loop.call_later(rest, self._expire, key, template)
        else:
            _retire(self._made.pop(key)[0])

    def retire(self, scratch: str | None = None) -> None:
        """Let the templates of this session make no more sandboxes; all of them if it is None."""
        self._generation += 1
        for key in [key for key, (_, place) in self._made.items() if scratch in (None, place)]:
            _retire(self._made.pop(key)[0])


def _retire(template: SandboxTemplate) -> None:
    _RETIRED.add(template)
    template.retire()


async def wait_until_idle_templates_ended() -> None:
    """Wait until the retired templates of this event loop have ended, except those of running sandboxes."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0)  # the sandboxes that have just ended are counted in this turn
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(sandboxed_process.DISMANTLING_S):
            await asyncio.gather(
                *(one.wait_until_ended() for one in list(_RETIRED) if one.loop is loop and one.is_idle)
            )
