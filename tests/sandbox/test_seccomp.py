"""The system call filter: its decisions, decoded from its bytes, and its effect on programs."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.sandbox_protocol import Sandbox
from handrail.sandbox.filters import seccomp
from handrail.sandbox.filters.seccomp import LAST_KNOWN, Machine
from handrail.sandbox.start.spawn import find_bubblewrap_programs

MACHINES: tuple[Machine, ...] = ("x86_64", "aarch64")
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FOREIGN = (0x40000003, 0x40000028, 0xC000003E, 0xC00000B7, 0, 0xFFFFFFFF)
ALLOWED, KILLED = 0x7FFF0000, 0x80000000


def decided(program: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Return the filter's decision by running its instructions as the kernel does."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(arguments + (0,) * 6)[:6])
    steps = list(struct.iter_unpack("<HBBI", program))
    accumulator, at = 0, 0
    while True:
        code, yes, no, k = steps[at]
        at += 1
        if code == 0x20:  # ld [k]
            assert k % 4 == 0
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif code == 0x54:  # and #k
            accumulator &= k
        elif code == 0x05:  # ja
            at += k
        elif code == 0x15:  # jeq
            at += yes if accumulator == k else no
        elif code == 0x35:  # jge
            at += yes if accumulator >= k else no
        elif code == 0x45:  # jset
            at += yes if accumulator & k else no
        else:
            assert code == 0x06, f"an instruction that seccomp does not know: {code:#x}"
            return k


def refused(number: int) -> int:
    return 0x50000 | number


def expected(machine: Machine, name: str | None, number: int, arguments: tuple[int, ...], *, unix: bool) -> int:
    """Return the decision by the lists, in the simplest way."""
    low = [argument & 0xFFFFFFFF for argument in arguments]
    if number > LAST_KNOWN or name in seccomp.NOT_IMPLEMENTED:
        return refused(errno.ENOSYS)
    if name in seccomp.NOT_PERMITTED:
        return refused(errno.EPERM)
    fine = True
    if name == "clone":
        fine = not low[0] & 0x7E020000
    elif name == "personality":
        fine = low[0] in (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)
    elif name == "ioctl":
        fine = low[1] not in (0x5412, 0x541C, 0x5423)
    elif name == "shmget":
        fine = arguments[1] <= 65_536 and not low[2] & 0o4000
    elif name == "semget":
        fine = low[1] <= 16
    elif name == "fcntl":
        fine = low[1] != 1031 or low[2] <= 65_536
    elif name is not None and name in seccomp.MODE_ARGUMENTS:
        fine = not low[seccomp.MODE_ARGUMENTS[name]] & 0o6000
    elif name is not None and name in seccomp.OPEN_CALLS:
        flags, mode = seccomp.OPEN_CALLS[name]
        fine = not (low[flags] & 0x400040 and low[mode] & 0o6000)
    elif name == "socketpair" and low[0] != 1:
        return refused(errno.EAFNOSUPPORT)
    elif name == "socket":
        family, kind, protocol = low[:3]
        if family not in ((1, 2, 10, 16) if unix else (2, 10, 16)):
            return refused(errno.EAFNOSUPPORT)
        if family == 16 and protocol != 0:
            return refused(errno.EPROTONOSUPPORT)
        if family in (2, 10):
            fine = kind & 0xF in (1, 2)
            if fine and protocol not in (0, 6, 17):
                return refused(errno.EPROTONOSUPPORT)
    return ALLOWED if fine else refused(errno.EPERM)


ARGUMENT = st.one_of(
    st.integers(0, 45),
    st.sampled_from(
        [
            *(0x5412, 0x541C, 0x5423, 0x5401, 0x40, 0x400000, 0o100644, 0o104755, 0o2755, 0x1200011, 0x10000000),
            *(1031, 16, 17, 0o4000, 65_536, 65_537, 1 << 32, (1 << 32) + 4_096),
        ]
    ),
    st.integers(0, 2**64 - 1),
)


@given(
    st.sampled_from(MACHINES),
    st.one_of(
        st.sampled_from(sorted(seccomp.NUMBERS["x86_64"].values())), st.integers(0, 600), st.integers(0, 2**32 - 1)
    ),
    st.tuples(*[ARGUMENT] * 6),
    st.booleans(),
)
def test_every_system_call_number_is_decided_as_listed(
    machine: Machine, number: int, arguments: tuple[int, ...], unix: bool
) -> None:
    names = {there: name for name, there in seccomp.NUMBERS[machine].items()}
    program = seccomp.build_filter(machine, unix_sockets=unix)
    wanted = expected(machine, names.get(number), number, arguments, unix=unix)
    assert decided(program, ARCHITECTURES[machine], number, arguments) == wanted


@given(st.sampled_from(MACHINES), st.sampled_from(FOREIGN), st.integers(0, 2**32 - 1))
def test_a_system_call_of_another_architecture_ends_the_program(
    machine: Machine, architecture: int, number: int
) -> None:
    if architecture != ARCHITECTURES[machine]:
        assert decided(seccomp.build_filter(machine), architecture, number) == KILLED


@pytest.mark.parametrize("machine", MACHINES)
def test_each_listed_system_call_is_refused_and_calls_of_the_launcher_are_allowed(machine: Machine) -> None:
    program, numbers = seccomp.build_filter(machine), seccomp.NUMBERS[machine]
    for name in seccomp.NOT_PERMITTED + seccomp.NOT_IMPLEMENTED:
        if name in numbers:
            assert decided(program, ARCHITECTURES[machine], numbers[name]) != ALLOWED, name
    for landlock in (444, 445, 446):
        assert decided(program, ARCHITECTURES[machine], landlock) == ALLOWED
    assert decided(program, ARCHITECTURES[machine], 0x40000000 + 39) == refused(errno.ENOSYS)  # x32's getpid


def test_every_listed_system_call_has_a_number() -> None:
    """Those that arm64 never had apart."""
    named = {*seccomp.NOT_PERMITTED, *seccomp.NOT_IMPLEMENTED, *seccomp.MODE_ARGUMENTS, *seccomp.OPEN_CALLS}
    assert named <= set(seccomp.NUMBERS["x86_64"])
    old = {"open", "creat", "chmod", "mknod", "uselib", "ustat", "sysfs", "modify_ldt", "_sysctl", "iopl", "ioperm"}
    old |= {"create_module", "get_kernel_syms", "query_module"}
    assert named - set(seccomp.NUMBERS["aarch64"]) == old


@pytest.mark.parametrize(
    ("machine", "header"),
    [("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "/usr/include/asm-generic/unistd.h")],
)
def test_the_system_call_numbers_match_the_kernel_headers(machine: Machine, header: str) -> None:
    if not Path(header).exists():
        pytest.skip(f"{header} is not installed")
    real = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", Path(header).read_text()))
    for name, number in seccomp.NUMBERS[machine].items():
        assert real.get(name, str(number)) == str(number), name


ATTEMPTS = """
import ctypes, errno, json, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments])
    return errno.errorcode.get(ctypes.get_errno(), "none")
def made(*of):
    try:
        socket.socket(*of).close()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "none"
listed, sockets = json.loads(sys.argv[1])
pair = [end.close() for end in socket.socketpair()]
print(json.dumps([{name: call(number, -1, -1, -1, -1, -1) for name, number in listed.items()}, [made(*of) for of in sockets]]))
"""


def under_the_filter(*argv: str) -> subprocess.CompletedProcess[bytes]:
    """Run ``argv`` in new namespaces without writable files, under the filter."""
    descriptor = os.memfd_create("filter")
    os.write(descriptor, seccomp.build_filter())
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        return subprocess.run(
            [
                *(
                    next(find_bubblewrap_programs()),
                    "--unshare-all",
                    "--unshare-user",
                    "--disable-userns",
                    "--cap-drop",
                    "ALL",
                ),
                *("--ro-bind", "/", "/", "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"),
                *("--tmpfs", "/tmp", "--die-with-parent", "--new-session", "--chdir", "/tmp"),
                *("--seccomp", str(descriptor), "--", *argv),
            ],
            pass_fds=(descriptor,),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=300,
            check=False,
        )
    finally:
        os.close(descriptor)


def test_a_program_gets_an_error_for_each_listed_system_call_and_socket_family(sandbox: Sandbox) -> None:
    """Each is asked for with arguments that are senseless, so that a filter that is missing does no harm."""
    machine = seccomp.get_supported_architecture()
    assert machine is not None
    numbers = seccomp.NUMBERS[machine]
    listed = {name: numbers[name] for name in seccomp.NOT_PERMITTED + seccomp.NOT_IMPLEMENTED if name in numbers}
    listed.pop("vhangup", None)  # has no argument that would make it harmless
    sockets = [(1, 1, 0), (2, 1, 0), (2, 2, 17), (10, 1, 6), (16, 3, 0)]
    sockets += [(2, 3, 1), (2, 1, 132), (2, 1, 262), (16, 3, 9), (16, 3, 15), (17, 3, 0), (38, 5, 0), (40, 1, 0)]
    ran = under_the_filter("/usr/bin/python3", "-c", ATTEMPTS, json.dumps([listed, sockets]))
    assert ran.returncode == 0, ran.stderr
    said, families = json.loads(ran.stdout)
    assert said == {name: "ENOSYS" if name in seccomp.NOT_IMPLEMENTED else "EPERM" for name in listed}
    assert families[:5] == ["EAFNOSUPPORT", "none", "none", "none", "none"]
    assert families[5:] == ["EPERM", *["EPROTONOSUPPORT"] * 4, *["EAFNOSUPPORT"] * 3]


THIRTY_TWO_BITS = """
import ctypes, mmap
# mov eax, 20 (getpid by the table of 32-bit programs); int 0x80; ret
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86 has two tables of system calls")
def test_a_32_bit_system_call_ends_the_program(sandbox: Sandbox) -> None:
    ran = under_the_filter("/usr/bin/python3", "-c", THIRTY_TWO_BITS)
    assert ran.returncode == 128 + signal.SIGSYS


ORDINARY = r"""
set -eu
git init -q here && cd here && echo hello > file && git add file
git -c user.name=n -c user.email=a@b commit -q -m first && git log --oneline | wc -l
tar cf file.tar file && tar xf file.tar && mkfifo pipe && chmod 755 file && cp -a file other
sleep 30 & jobs -p > /dev/null; kill %1
python3 - <<'PYTHON'
import asyncio, socket, threading
async def main():
    process = await asyncio.create_subprocess_exec("true")
    assert await process.wait() == 0
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    await asyncio.open_connection(*server.sockets[0].getsockname())
    assert socket.getaddrinfo("localhost", 80)
asyncio.run(main())
threading.Thread(target=print, args=("threads",)).start()
PYTHON
for tool in gcc make node; do
  command -v $tool > /dev/null || continue
  case $tool in
    gcc) printf 'int main(void) { return 0; }' > a.c && gcc a.c -o a && ./a ;;
    make) printf 'all:\n\t@true\n' > Makefile && env -u MAKELEVEL -u MAKEFLAGS make ;;
    node) node -e 'require("os").networkInterfaces(); require("child_process").execFileSync("true")' ;;
  esac
done
"""


def test_ordinary_programs_work_under_the_filter(sandbox: Sandbox) -> None:
    ran = under_the_filter("/bin/bash", "-c", ORDINARY)
    assert (ran.returncode, ran.stdout.split()) == (0, [b"1", b"threads"]), ran.stderr


def test_a_program_cannot_set_the_set_user_id_bit_in_any_way(sandbox: Sandbox) -> None:
    """It would hold outside the sandbox as well."""
    script = """
import os
def tried(what, *of):
    try:
        what(*of)
    except PermissionError:
        return
    print(what.__name__, of)
open("file", "w").close()
for mode in (0o4755, 0o2755, 0o6000):
    tried(os.chmod, "file", mode)
    tried(os.fchmod, os.open("file", os.O_RDONLY), mode)
    tried(os.open, "new", os.O_CREAT | os.O_WRONLY, mode)
    tried(os.open, ".", os.O_TMPFILE | os.O_WRONLY, mode)
    tried(os.mknod, "node", 0o100000 | mode)
os.open("file", os.O_RDONLY, 0o4755)  # creates nothing, so the mode says nothing
os.chmod("file", 0o755)
"""
    ran = under_the_filter("/usr/bin/python3", "-c", script)
    assert (ran.returncode, ran.stdout) == (0, b""), ran.stderr


def test_an_unsupported_architecture_has_no_filter_and_the_error_lists_the_supported_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other:
        machine = "riscv64"

    monkeypatch.setattr(seccomp.os, "uname", Other)
    assert seccomp.get_supported_architecture() is None
    with pytest.raises(ValueError, match=r"filter exists for riscv64\. Use x86_64 or aarch64"):
        seccomp.build_filter.__wrapped__()
