"""A FUSE mount over a folder that ignores case or normal forms in names.

It speaks the kernel's own FUSE protocol, so it needs neither a library nor a package. A program of its own serves it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import sys
import unicodedata
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

(LOOKUP, FORGET, GETATTR, SETATTR, READLINK, SYMLINK, MKNOD, MKDIR) = (1, 2, 3, 4, 5, 6, 8, 9)
(UNLINK, RMDIR, RENAME, LINK, OPEN, READ, WRITE, STATFS, RELEASE) = (10, 11, 12, 13, 14, 15, 16, 17, 18)
(FSYNC, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, FSYNCDIR) = (20, 25, 26, 27, 28, 29, 30)
(CREATE, INTERRUPT, BATCH_FORGET, RENAME2) = (35, 36, 42, 45)
REQUESTS = {
    "setattr": SETATTR,
    "symlink": SYMLINK,
    "mkdir": MKDIR,
    "unlink": UNLINK,
    "link": LINK,
    "write": WRITE,
    "fsync": FSYNC,
    "flush": FLUSH,
    "fsyncdir": FSYNCDIR,
    "create": CREATE,
    "mknod": MKNOD,
}
"""The requests that a disk can refuse."""
HABITS = {
    "replace": "the error of a rename over an existing name",
    "flags": "the error of a rename with flags",
    "chmod": "the error of a change of permissions",
    "chown": "the error of a change of the owner",
    "times": "the seconds that times are rounded to",
    "modes": "the permissions that every entry has, in octal digits",
    "owner": "the user that every entry belongs to",
    "space": "the bytes that can be written before the disk is full",
}
_IGNORED = frozenset((FORGET, INTERRUPT, BATCH_FORGET))
_HEADER = struct.Struct("<IIQQIIIHH")
_MAX_REQUEST = 1 << 20


def same_case(name: str) -> str:
    """As HFS+ and APFS compare names: without case and normal form."""
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())


def same_form(name: str) -> str:
    """As APFS compares names if it keeps case apart."""
    return unicodedata.normalize("NFD", name)


def short_or_long(name: str) -> str:
    """As vfat compares names, of which each long one has a short one, too."""
    head, dot, tail = name.casefold().rpartition(".")
    stem, tail = (head, tail) if dot and head else (name.casefold(), "")
    return f"{stem[:6]}~1{'.' if tail else ''}{tail[:3]}" if len(stem) > 8 else name.casefold()


def exact(name: str) -> str:
    """As ext4 compares names."""
    return name


KINDS: dict[str, Callable[[str], str]] = {
    "case": same_case,
    "form": same_form,
    "short": short_or_long,
    "exact": exact,
}


class Disk:
    """The server of one mount.

    :param numbers: ``one`` number for each file, ``many``: one for each spelling, as the library's simple interface
        gives them, or ``path``: one that follows from the path, so a rename changes it
    :param only: the only name of folders in which names are folded; empty for all
    :param habits: what the disk cannot do: the name of a request with the error that it gets, or a name of the table
        :data:`HABITS`
    """

    def __init__(self, source: str, kind: str, numbers: str, only: str, habits: Mapping[str, str]) -> None:
        self.fold = KINDS[kind]
        self.many = numbers == "many"
        self.by_path = numbers == "path"
        self.only = only
        self.habits = dict(habits)
        self.refused = {REQUESTS[name]: error for name, error in habits.items() if name in REQUESTS}
        self.nodes: dict[int, tuple[str, str]] = {1: (source, source)}
        """The real path of each node, and the path as it was spelled."""
        self.by_spelling: dict[str, int] = {source: 1}
        self.last_node = 1
        self.handles: dict[int, int | list[tuple[str, os.stat_result]]] = {}
        self.next_handle = 1

    def find(self, parent: int, name: str) -> str:
        """The real path that a name has in a folder."""
        folder = self.nodes[parent][0]
        names = os.listdir(folder)
        if name not in names and (not self.only or os.path.basename(folder) == self.only):
            want = self.fold(name)
            name = next((one for one in names if want in (self.fold(one), one)), name)
        return f"{folder}/{name}"

    def node(self, parent: int, name: str) -> int:
        real = self.find(parent, name)
        os.lstat(real)
        spelled = f"{self.nodes[parent][1]}/{name}" if self.many else real
        if spelled not in self.by_spelling:
            self.last_node += 1
            self.by_spelling[spelled] = self.last_node
        number = self.by_spelling[spelled]
        self.nodes[number] = (real, spelled)
        return number

    def attributes(self, node: int) -> bytes:
        found = os.lstat(self.nodes[node][0])
        tick = int(self.habits.get("times", "0")) * 10**9
        times = [one - one % tick if tick else one for one in (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)]
        number = node if self.many else found.st_ino
        if self.by_path:
            number = zlib.crc32(os.fsencode(self.nodes[node][0])) + 2
        mode, owner = found.st_mode, int(self.habits.get("owner", found.st_uid))
        if given := self.habits.get("modes"):
            mode = stat.S_IFMT(mode) | int(given, 8)
        return struct.pack(
            "<6Q10I",
            number,
            found.st_size,
            found.st_blocks,
            *(time // 10**9 for time in times),
            *(time % 10**9 for time in times),
            mode,
            found.st_nlink,
            owner,
            found.st_gid,
            found.st_rdev,
            4096,
            0,
        )

    def entry(self, node: int) -> bytes:
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + self.attributes(node)

    def opened(self, handle: int | list[tuple[str, os.stat_result]]) -> bytes:
        self.next_handle += 1
        self.handles[self.next_handle] = handle
        return struct.pack("<QIi", self.next_handle, 0, 0)

    def answer(self, code: int, node: int, body: bytes) -> bytes:
        def names(skip: int) -> list[str]:
            return [os.fsdecode(part) for part in body[skip:].split(b"\0")[:-1]]

        real = self.nodes[node][0] if node in self.nodes else ""
        if code in self.refused:
            raise self.error(self.refused[code])
        match code:
            case 26:  # INIT
                major, minor, ahead, _ = struct.unpack_from("<4I", body)
                return struct.pack("<4IHHIIHHI28x", major, min(minor, 31), ahead, 0, 12, 10, 128 * 1024, 1, 32, 0, 0)
            case 1:  # LOOKUP
                return self.entry(self.node(node, names(0)[0]))
            case 3:  # GETATTR
                return struct.pack("<QII", 0, 0, 0) + self.attributes(node)
            case 4:  # SETATTR
                self.set_attributes(real, body)
                return struct.pack("<QII", 0, 0, 0) + self.attributes(node)
            case 5:  # READLINK
                return os.fsencode(os.readlink(real))
            case 6:  # SYMLINK
                name, target = names(0)
                os.symlink(target, self.find(node, name))
                return self.entry(self.node(node, name))
            case 8:  # MKNOD
                mode, number, _, _ = struct.unpack_from("<4I", body)
                os.mknod(self.find(node, names(16)[0]), mode, number)
                return self.entry(self.node(node, names(16)[0]))
            case 9:  # MKDIR
                os.mkdir(self.find(node, names(8)[0]), struct.unpack_from("<I", body)[0])
                return self.entry(self.node(node, names(8)[0]))
            case 10:
                os.unlink(self.find(node, names(0)[0]))
            case 11:
                os.rmdir(self.find(node, names(0)[0]))
            case 12 | 45:  # RENAME
                old, new = names(8 if code == 12 else 16)
                there, flags = struct.unpack_from("<QI", body + b"\0" * 4)
                spellings = (f"{self.nodes[node][1]}/{old}", f"{self.nodes[there][1]}/{new}")
                self.rename(self.find(node, old), self.find(there, new), flags if code == 45 else 0, spellings)
            case 13:  # LINK
                (old_node,) = struct.unpack_from("<Q", body)
                os.link(self.nodes[old_node][0], self.find(node, names(8)[0]))
                return self.entry(self.node(node, names(8)[0]))
            case 14:  # OPEN
                return self.opened(os.open(real, struct.unpack_from("<I", body)[0] & ~os.O_NOFOLLOW))
            case 15:  # READ
                handle, offset, size = struct.unpack_from("<QQI", body)
                descriptor = self.handles[handle]
                return os.pread(descriptor, size, offset) if isinstance(descriptor, int) else b""
            case 16:  # WRITE
                handle, offset, size = struct.unpack_from("<QQI", body)
                descriptor = self.handles[handle]
                assert isinstance(descriptor, int)
                self.use_space(size)
                return struct.pack("<II", os.pwrite(descriptor, body[40 : 40 + size], offset), 0)
            case 17:  # STATFS
                return struct.pack("<5Q4I24x", 1 << 20, 1 << 19, 1 << 19, 1 << 20, 1 << 19, 4096, 255, 4096, 0)
            case 18 | 29:  # RELEASE
                handle = self.handles.pop(struct.unpack_from("<Q", body)[0], None)
                if isinstance(handle, int):
                    os.close(handle)
            case 27:  # OPENDIR
                return self.opened([(name, os.lstat(f"{real}/{name}")) for name in os.listdir(real)])
            case 28:  # READDIR
                return self.list_entries(body)
            case 35:  # CREATE
                flags, mode = struct.unpack_from("<II", body)
                name = names(16)[0]
                handle = self.opened(os.open(self.find(node, name), flags | os.O_CREAT, mode))
                return self.entry(self.node(node, name)) + handle
            case 20 | 25 | 30:
                pass
            case _:
                raise OSError(errno.ENOSYS, "not here")
        return b""

    @staticmethod
    def error(name: str) -> OSError:
        return OSError(getattr(errno, name), name)

    def use_space(self, size: int) -> None:
        if "space" in self.habits:
            left = int(self.habits["space"]) - size
            if left < 0:
                raise self.error("ENOSPC")
            self.habits["space"] = str(left)

    def set_attributes(self, real: str, body: bytes) -> None:
        valid, _, _, size, _, accessed, modified = struct.unpack_from("<IIQQQQQ", body)
        accessed_ns, modified_ns, _, mode, _, uid, gid = struct.unpack_from("<7I", body, 56)
        for bits, habit in ((1, "chmod"), (6, "chown")):
            if valid & bits and habit in self.habits:
                raise self.error(self.habits[habit])
        if valid & 1:
            os.chmod(real, stat.S_IMODE(mode))
        if valid & 6:
            os.lchown(real, uid if valid & 2 else -1, gid if valid & 4 else -1)
        if valid & 8:
            os.truncate(real, size)
        if valid & 0x30:
            before = os.lstat(real)
            times = (accessed * 10**9 + accessed_ns, modified * 10**9 + modified_ns)
            now = (valid & 0x180) != 0
            kept = (before.st_atime_ns, before.st_mtime_ns)
            if now:
                os.utime(real)
            else:
                os.utime(real, ns=(times[0] if valid & 0x10 else kept[0], times[1] if valid & 0x20 else kept[1]))

    def rename(self, old: str, new: str, flags: int, spellings: tuple[str, str]) -> None:
        if old == new:  # only the case changes
            new = f"{os.path.dirname(new)}/{os.path.basename(spellings[1])}"
        if flags and "flags" in self.habits:
            raise self.error(self.habits["flags"])
        if flags & 1 and os.path.lexists(new):
            raise self.error("EEXIST")
        if "replace" in self.habits and old != new and os.path.lexists(new):
            raise self.error(self.habits["replace"])
        if flags & ~1:
            raise OSError(errno.EINVAL, "not here")
        os.rename(old, new)
        beneath = [one for one, (real, _) in self.nodes.items() if real == old or real.startswith(f"{old}/")]
        for number in beneath:
            real, spelled = self.nodes[number]
            self.by_spelling.pop(spelled, None)
            self.nodes[number] = (new + real[len(old) :], spelled)
        for number in beneath:
            real, spelled = self.nodes[number]
            if not self.many:
                self.nodes[number] = (real, real)
            elif spelled == spellings[0] or spelled.startswith(f"{spellings[0]}/"):
                self.nodes[number] = (real, spellings[1] + spelled[len(spellings[0]) :])
            else:
                continue  # the next look at this spelling gets another number
            self.by_spelling[self.nodes[number][1]] = number

    def list_entries(self, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        entries = self.handles[handle]
        assert isinstance(entries, list)
        out = b""
        for place, (name, found) in list(enumerate(entries))[offset:]:
            raw = os.fsencode(name)
            one = struct.pack("<QQII", found.st_ino, place + 1, len(raw), found.st_mode >> 12) + raw
            one += b"\0" * (-len(one) % 8)
            if len(out) + len(one) > size:
                break
            out += one
        return out

    def serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, _MAX_REQUEST)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):
                    continue
                return  # it was unmounted
            _, code, unique, node, *_ = _HEADER.unpack_from(request)
            if code in _IGNORED:
                continue
            number, data = 0, b""
            try:
                data = self.answer(code, node, request[_HEADER.size :])
            except OSError as error:
                number = -(error.errno or errno.EIO)
            try:
                os.write(device, struct.pack("<IiQ", 16 + len(data), number, unique) + data)
            except OSError:
                continue  # the caller was killed


def _mount(folder: str) -> int:
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    if libc.mount(b"handrail-test", os.fsencode(folder), b"fuse.handrail", 6, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), folder)
    return device


@contextmanager
def mounted(
    source: Path, folder: Path, kind: str, *, numbers: str = "one", only: str = "", **habits: str
) -> Generator[Path]:
    """Mount ``source`` at ``folder`` until the block ends. The test is skipped where no one may mount."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("a disk that ignores case is a FUSE mount, and /dev/fuse cannot be opened here")
    source.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    server = subprocess.Popen(
        [sys.executable, __file__, str(source), str(folder), kind, numbers, only, json.dumps(habits)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        answer = server.stdout.readline().strip()
        if answer != "ready":
            pytest.skip(f"a disk that ignores case is a FUSE mount, which is not permitted here: {answer}")
        yield folder
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(folder), 2)
        server.stdout.close()
        server.wait()


def _main(source: str, folder: str, kind: str, numbers: str, only: str, habits: str) -> None:
    try:
        device = _mount(folder)
    except OSError as error:
        print(error.strerror, flush=True)
        return
    os.umask(0)
    print("ready", flush=True)
    Disk(source, kind, numbers, only, json.loads(habits)).serve(device)


if __name__ == "__main__":
    _main(*sys.argv[1:])
