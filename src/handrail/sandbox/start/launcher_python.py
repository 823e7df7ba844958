"""The first process of a sandbox on a machine without perl. It runs inside, so it imports nothing of Handrail.

:mod:`handrail.sandbox.start.launcher_messages` describes its input and answers; ``launcher.pl`` does the same, faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import stat
import struct
import sys
from typing import NoReturn

RULES_FOR_FILES, RULES_FOR_PORTS = 1, 2
O_PATH = 0o10000000


def fail(channel: int, why: object) -> NoReturn:
    os.write(channel, f"E{why}".encode("utf-8", "replace"))
    os._exit(125)


def read_message_part(channel: int, letter: int) -> list[bytes]:
    """Read the letter's next part: its length, then items with their lengths."""

    def exactly(wanted: int) -> bytes:
        text = b""
        while len(text) < wanted:
            piece = os.read(letter, wanted - len(text))
            if not piece:
                fail(channel, "the letter is cut")
            text += piece
        return text

    rest = exactly(int.from_bytes(exactly(4), "big"))
    items: list[bytes] = []
    while rest:
        end = 4 + int.from_bytes(rest[:4], "big")
        items.append(rest[4:end])
        rest = rest[end:]
    return items


def pop_counted_items(items: list[bytes]) -> list[bytes]:
    """Remove and return the items of a list that starts with their count."""
    count = int(items.pop(0))
    found = items[:count]
    del items[:count]
    return found


class MountWatch:
    """The mounts of this sandbox, described for the holder and watched from the start.

    bubblewrap mounts by path, and a path can lead elsewhere a moment later. So the holder compares the mounts with
    those that were asked for. The kernel reports each change of the table, and renames in the folders.

    :param folders: those in which names must stay
    """

    def __init__(self, folders: list[bytes]) -> None:
        self.table = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self.changed = select.poll()
        self.changed.register(self.table, select.POLLPRI)
        self.folders: list[int] = []
        self.renamed = False
        """Whether the kernel has reported a rename in one of the folders."""
        self.polled = not self.watch_folder_renames(folders)
        self.first = self.read_mount_table()

    def watch_folder_renames(self, folders: list[bytes]) -> bool:
        """Ask the kernel for SIGIO on each rename in the folders; return whether it supports that.

        Unlike inotify, this does not use up a limit that the user's editors share.
        """
        signal.signal(signal.SIGIO, self.note_rename_signal)
        try:
            for folder in folders:
                self.folders.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
                fcntl.fcntl(self.folders[-1], fcntl.F_NOTIFY, fcntl.DN_RENAME | fcntl.DN_MULTISHOT)
        except OSError:
            return False
        return True

    def note_rename_signal(self, _number: int, _frame: object) -> None:
        self.renamed = True

    @property
    def poll_interval(self) -> float | None:
        """How long to wait before :meth:`lost` checks again; None if the kernel reports every change."""
        return 0.05 if self.polled else None

    def read_mount_table(self) -> bytes:
        text, place = b"", 0
        while piece := os.pread(self.table, 65536, place):
            text += piece
            place += len(piece)
        return text

    def describe_mounts_for_holder(self, looked: list[bytes]) -> bytes:
        """Return the table, and device and inode of these paths, in the form that the holder reads."""
        message = b"".join(
            len(item).to_bytes(4, "big") + item for item in (self.first, *map(read_device_and_inode, looked))
        )
        return b"T" + len(message).to_bytes(4, "big") + message

    def find_lost_mount(self, has_event: bool) -> bytes | None:
        """Return the mount point of a mount that has changed or ended; None if there is none.

        :param has_event: whether the kernel has reported a change of the table, which it does only once
        """
        renamed, self.renamed = self.renamed, False
        if not (self.changed.poll(0) or has_event or renamed or self.polled):
            return None
        was, now = self.parse_fixed_mount_facts(self.first), self.parse_fixed_mount_facts(self.read_mount_table())
        lost: list[bytes] = []
        for number, facts in was.items():
            if (there := now.pop(number, None)) != facts:
                lost.append(self.find_moved_folder(facts[0], there[0] if there is not None else b""))
        lost = lost or [facts[0] for facts in now.values()]
        return unescape_mountinfo_path(min(lost, key=len)) if lost else None

    @staticmethod
    def find_moved_folder(point: bytes, other: bytes) -> bytes:
        """Return the outermost moved folder that explains why a mount point is now at ``other``."""
        while other != point and point.count(b"/") > 1 and other.count(b"/") > 1:
            (folder, _, name), (another, _, same) = point.rpartition(b"/"), other.rpartition(b"/")
            if name != same:
                break
            point, other = folder, another  # it is in a folder that was moved
        return point

    @staticmethod
    def parse_fixed_mount_facts(text: bytes) -> dict[bytes, tuple[bytes, ...]]:
        """Return by mount id what must not change of each mount outside /proc."""
        lines = (line.split(b" ", 6) for line in text.rstrip(b"\n").split(b"\n"))
        return {
            number: (point, parent, device, options)
            for number, parent, device, _root, point, options, _rest in lines
            if not point.startswith(b"/proc/")
        }


def read_device_and_inode(path: bytes) -> bytes:
    try:
        found = os.stat(path)  # noqa: PTH116 - no more is imported than is needed
    except OSError:
        return b""
    return b"%d:%d" % (found.st_dev, found.st_ino)


def unescape_mountinfo_path(path: bytes) -> bytes:
    first, *rest = path.split(b"\\")
    return first + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in rest)


def wait_for_program_and_exit(
    program: int, lifeline: int, others: list[int], child_ended: int, mounts: MountWatch | None
) -> NoReturn:
    """Wait until the program or a mount has ended, or the lifeline is closed, then end this process.

    The kernel ends all other processes of the sandbox with it.
    """
    ended = os.pidfd_open(program)
    for number in (0, 1, 2, *others):
        with contextlib.suppress(OSError):
            os.close(number)
    waiting = [lifeline, ended, child_ended]
    has_event = False
    while True:
        code = reap_children(program)
        lost = mounts.find_lost_mount(has_event) if mounts else None
        if lost is not None:
            kill_sandbox_and_exit(lifeline, 137, lost)
        if code is not None:
            kill_sandbox_and_exit(lifeline, code, b"")
        tables, patience = ([mounts.table], mounts.poll_interval) if mounts else ([], None)
        ready, _, changed = select.select(waiting, [], tables, patience)
        has_event = bool(changed)
        if lifeline in ready:
            os._exit(129)
        if child_ended in ready:
            os.read(child_ended, 4096)


def reap_children(program: int) -> int | None:
    """Reap ended children up to the program, and return the program's exit code if it has ended."""
    while True:
        try:
            gone, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            os._exit(125)
        if gone == 0:
            return None
        if gone == program:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def kill_sandbox_and_exit(lifeline: int, code: int, lost: bytes) -> NoReturn:
    """End all other processes, report to the holder, and exit with this code.

    :param lost: the mount point of a mount that has ended
    """
    with contextlib.suppress(OSError):
        os.kill(-1, signal.SIGKILL)  # all but this process
        while os.waitpid(-1, 0):
            pass
    with contextlib.suppress(OSError):
        os.write(lifeline, bytes([code]) + lost)
    os._exit(code)


def write_namespace_limits(counts: list[bytes]) -> str | None:
    """Write the settings of this user namespace, give up the capability for it, and return any problem.

    If a setting cannot be written, ``handrail doctor`` reports it.
    """
    for setting, number in zip(counts[::2], counts[1::2], strict=True):
        with contextlib.suppress(OSError):
            file = os.open(setting, os.O_WRONLY)
            os.write(file, number)
            os.close(file)
    version, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    if ctypes.CDLL(None, use_errno=True).capset(version, none) != 0:
        return f"its capability cannot be given up: {os.strerror(ctypes.get_errno())}"
    return None


def apply_landlock_ruleset(ruleset: bytes, file_rights: int, rules: list[bytes]) -> None:
    """Apply the Landlock ruleset, by system calls with the same numbers on every architecture."""
    call = ctypes.CDLL(None, use_errno=True).syscall

    def checked(what: str, *arguments: object) -> int:
        found = int(call(*arguments))
        if found < 0:
            raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")
        return found

    put = checked("Landlock cannot be used", 444, ruleset, ctypes.c_size_t(len(ruleset)), 0)
    for kind, what, rights in zip(rules[::3], rules[1::3], rules[2::3], strict=True):
        if kind == b"port":
            checked("no Landlock rule can be made for a port", 445, put, RULES_FOR_PORTS, rights + what, 0)
            continue
        try:
            place = os.open(what, O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # a missing path needs no rule
        allowed = int.from_bytes(rights, sys.byteorder)
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            allowed &= file_rights
        rule = struct.pack("=Qi", allowed, place)
        checked(f"no Landlock rule can be made for {os.fsdecode(what)}", 445, put, RULES_FOR_FILES, rule, 0)
        os.close(place)
    checked("Landlock cannot be put into force", 446, put, 0)


def exec_program(argv: list[bytes], environment: list[bytes]) -> int:
    """Become the program as the C library finds and starts it; return an error number if that fails."""
    pairs = [name + b"=" + value for name, value in zip(environment[::2], environment[1::2], strict=True)]
    path = next((pair[5:] for pair in pairs if pair.startswith(b"PATH=")), None)
    if path is not None:
        os.environb[b"PATH"] = path  # execvpe searches the caller's own PATH
    words = (ctypes.c_char_p * (len(argv) + 1))(*argv, None)
    variables = (ctypes.c_char_p * (len(pairs) + 1))(*pairs, None)
    ctypes.CDLL(None, use_errno=True).execvpe(argv[0], words, variables)
    return ctypes.get_errno()


def report_failed_start_and_exit(channel: int, name: bytes, number: int) -> NoReturn:
    """Report why a program could not be run, and exit, both as a shell does.

    :param number: of the error
    """
    if number == 7:
        os.write(channel, b"L")
    fields = {2: "command not found", 7: "its arguments are too long", 8: "not a program", 13: "permission denied"}
    os.write(2, name + b": " + fields.get(number, os.strerror(number)).encode() + b"\n")
    os._exit(127 if number == 2 else 126)


def require_private_namespaces(namespaces: list[bytes], channel: int) -> None:
    """Check that this process shares no namespace with the machine.

    :param namespaces: those of the machine
    """
    for space in namespaces:
        kind = space.partition(b":")[0]
        if os.readlink(b"/proc/self/ns/" + kind) == space:  # noqa: PTH115 - no more is imported than is needed
            fail(channel, f"it shares the {kind.decode()} namespace of this machine")


def prefer_sandboxes_for_oom_kill() -> None:
    """Let the kernel's out-of-memory killer choose sandboxes first."""
    with contextlib.suppress(OSError):
        score = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(score, b"500")
        os.close(score)


def main(channel: int, letter: int, lifeline: int, spare: int, *others: int) -> NoReturn:
    os.close(spare)
    items = read_message_part(channel, letter)
    mode, namespaces, ruleset, file_rights, _prlimit, terminal, _capset, _signals = items[:8]
    del items[:8]
    counts, limits, rules, looked, folders = (pop_counted_items(items) for _ in range(5))
    require_private_namespaces(namespaces.split(), channel)
    if (why := write_namespace_limits(counts)) is not None:
        fail(channel, why)
    mounts = MountWatch(folders) if looked else None
    if mounts is not None:
        os.write(channel, mounts.describe_mounts_for_holder(looked))
    child_ended, telling = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(telling, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    program = os.fork()
    if program:
        wait_for_program_and_exit(program, lifeline, [channel, letter, *others], child_ended, mounts)
    os.close(lifeline)
    prefer_sandboxes_for_oom_kill()
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        if ruleset:
            apply_landlock_ruleset(ruleset, int.from_bytes(file_rights, sys.byteorder), rules)
        for number, bounds in zip(limits[::2], limits[1::2], strict=True):
            resource.setrlimit(int(number), struct.unpack("=qq", bounds))
        if terminal != b"0":
            os.setsid()
            fcntl.ioctl(0, 0x540E, 0)  # TIOCSCTTY
        if mode == b"shell":
            script = items.pop(0)
            environment = dict(zip(items[::2], items[1::2], strict=True))
            os.set_inheritable(channel, True)
            os.set_inheritable(letter, True)
            bash = [b"/bin/bash", b"--noprofile", b"--norc", b"-c", script, b"/bin/bash"]
            os.execve(bash[0], bash, environment)  # noqa: S606
        os.write(channel, b"r")
        if not os.read(channel, 1):
            os._exit(125)
        folder, count, *given = read_message_part(channel, letter)
        os.chdir(folder)
        argv, rest = given[: int(count)], given[int(count) :]
        os.set_inheritable(channel, False)
        os.set_inheritable(letter, False)
    except (OSError, ValueError) as error:
        fail(channel, error)
    os.write(channel, b"x")
    report_failed_start_and_exit(channel, argv[0], exec_program(argv, rest))


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
