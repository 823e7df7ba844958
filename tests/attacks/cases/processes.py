"""Programs that exhaust resources, reach other processes, or outlive their call."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.attacks.case import Case, Probe, breach, python, shell
from tests.attacks.victim import VictimHome, said_by

_DAEMON = """
import os, signal, sys, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
print('daemon', os.getpid(), flush=True)
time.sleep(600)
"""


_TYPES = """
import fcntl, os
for place in ("/dev/tty", "/dev/console", "/proc/self/fd/0", "/proc/1/fd/0", *(f"/dev/pts/{n}" for n in range(64))):
    try:
        terminal = os.open(place, os.O_RDWR | os.O_NOCTTY)
    except OSError:
        continue
    for command, argument in ((0x5412, b"x"), (0x541C, b"\\3x"), (0x5423, b"\\0\\0\\0\\0")):
        try:
            fcntl.ioctl(terminal, command, argument)
            print("REACHED", place, hex(command))
        except OSError as error:
            print(place, error)
    if os.fstat(terminal).st_rdev != os.fstat(0).st_rdev and place not in ("/dev/tty",):
        print("REACHED another terminal", place)
print("tried to", "its end", os.isatty(0), flush=True)
"""


async def _types(home: VictimHome) -> str | None:
    async with home.session() as session:
        started = await session.call("terminal.start", {"command": f"python3 {home.probe(_TYPES)}"})
        if not started.ok:
            return f"no terminal was started: {started.error_text}"
        text, state = "", "running"
        while state == "running":
            told = (await session.call("terminal.read", {"id": started.data["job_id"]})).data
            text, state = text + told["text"], told["state"]
    if "tried to its end True" not in text:
        return f"the probe did not run to its end: {text[-600:]!r}"
    return f"{text[-600:]!r}" if "REACHED" in text else None


def _running(mark: str) -> list[str]:
    """Processes anywhere in the outer sandbox with ``write_marker_file`` in their command line."""
    found: list[str] = []
    for process in Path("/proc").iterdir():
        try:
            told = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
        except OSError:
            continue
        if mark.encode() in told and int(process.name) != os.getpid():
            found.append(f"{process.name} {told!r}"[:120])
    return found


async def _daemons_end(home: VictimHome) -> str | None:
    name = home.probe(_DAEMON)
    said = await home.shell(f"for i in 1 2 3; do python3 {name} handrail-daemon-mark; done; sleep 0.1; echo ENDS")
    if said.count("daemon ") != 3:
        return f"the daemons did not start: {said!r}"
    return breach(_running("handrail-daemon-mark"), "processes outlived their call")


async def _answered_at_exit(home: VictimHome) -> str | None:
    """A child keeps the pipe open: the call is answered at the shell's exit, and the child ends with it."""
    result = await home.call("bash", command="sleep 4321 & echo done", timeout_ms=60_000)
    if not result.ok or "done" not in said_by(result):
        return f"it was not answered at the exit: {result!r}"[:600]
    return breach(_running("sleep\x004321"), "processes outlived their call")


async def _timeout_ends_all(home: VictimHome) -> str | None:
    name = home.probe(_DAEMON)
    result = await home.call("bash", command=f"python3 {name} handrail-late-mark; cat", timeout_ms=3_000)
    if result.ok and "exit_code" not in str(result.data):
        return f"a command that never ends was answered with success: {result!r}"[:600]
    return breach(_running("handrail-late-mark"), "processes outlived the time-out")


async def _endless_output(home: VictimHome) -> str | None:
    result = await home.call("bash", command="yes handrail | head -c 300000000; echo; echo THE-END", timeout_ms=90_000)
    if not result.ok:
        return f"it was not answered: {result!r}"[:600]
    kept = len(str(result.data))
    return f"{kept} characters came back" if kept > 1_000_000 else None


async def _until_ended(mark: str) -> None:
    """Wait for the end of each process with ``write_marker_file`` in its command line, also of those that it starts meanwhile."""
    loop = asyncio.get_running_loop()
    while found := _running(mark):
        for told in found:
            try:
                descriptor = os.pidfd_open(int(told.split()[0]))
            except OSError:
                continue  # it has ended already
            ended = asyncio.Event()
            loop.add_reader(descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)


async def _fork_bomb(home: VictimHome) -> str | None:
    """The bomb must not keep anybody else from starting a process, and end with its call."""
    code = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    name = home.probe(code)
    result = await home.call("bash", command=f"python3 {name} handrail-bomb", timeout_ms=4_000)
    if (left := _running("handrail-bomb")) and not result.metadata.get("still_running"):
        return f"{len(left)} processes outlived their call, as {left[0]}; it was answered {result!r}"[:900]
    await _until_ended("handrail-bomb")  # the answer said so; the case has a time of its own
    after = await home.shell("echo still-here")
    return None if "still-here" in after else f"after the bomb nothing can be started: {after!r}"


async def _kill_everybody(home: VictimHome) -> str | None:
    said = await home.shell("trap '' TERM; (kill -9 -1); (kill -TERM -1); echo; exit 0")
    after = await home.shell("echo still-here")
    return None if "still-here" in after else f"{said!r}, then {after!r}"


def _memory() -> Probe:
    """The memory limit of one process is far below a harmful amount."""
    code = (
        "import mmap\nattempts = 0\nheld = []\ntry:\n    while attempts < 256:\n"
        "        held.append(mmap.mmap(-1, 1 << 28, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))\n        attempts += 1\n"
        "except OSError:\n    pass\nprint('held', attempts, 'quarters of a GiB')\n"
    )  # nothing is written to it: address space is what is used up here, and no memory

    async def tried(home: VictimHome) -> str | None:
        said = await home.python(code)
        if "held 256 " in said:
            return f"64 GiB were granted: {said!r}"
        return None if "held" in said else said

    return tried


def _held_together(how: str) -> Probe:
    """Memory that no limit of one process counts: twice the limit of a call cannot be kept."""
    code = f"import mmap, os, time\nMIB = 1 << 20\n{how}\ntime.sleep(90)\nprint('REACHED', os.getpid())\n"

    async def tried(home: VictimHome) -> str | None:
        async with home.elsewhere(settings="[sandbox]\ncall_memory_mib = 256\n") as (session, workspace):
            (workspace / "hold.py").write_text(code)
            result = await session.call("bash", {"command": "python3 hold.py handrail-holder", "timeout_ms": 60_000})
        if result.ok or "call_memory_mib" not in (result.error_text or ""):
            return f"it kept what it took: {result!r}"[:900]
        return breach(_running("handrail-holder"), "processes outlived their call")

    return tried


CASES: list[Case] = [
    Case(
        "daemons", "processes", "double-forked, setsid, TERM-ignoring children", "none outlives its call", _daemons_end
    ),
    Case(
        "a child that keeps the pipe",
        "processes",
        "a shell tool that waits for the pipe to close never returns",
        "answered at the exit, and the child is ended",
        _answered_at_exit,
    ),
    Case("time-out", "processes", "a time-out that ends the leader only", "everything ends with it", _timeout_ends_all),
    Case("yes", "processes", "output without end fills the memory", "cut while it streams", _endless_output, slow=True),
    Case("kill -9 -1", "processes", "kills everything that one may signal", "reaches nobody outside", _kill_everybody),
    shell(
        "signals to the outside",
        "processes",
        "kill -0 tells who is there, kill -9 ends them",
        "no process of the outside can be named",
        f'kill -0 {os.getpid()} && [ "$(cat /proc/{os.getpid()}/comm)" != bash ] && '
        f"grep -q tests.attacks /proc/{os.getpid()}/cmdline && echo REACHED",
    ),
    python(
        "ptrace and process_vm_readv",
        "processes",
        "a debugger reads and changes whoever it may attach to",
        "neither the sandbox's first process nor anybody else can be attached to",
        "import platform\n"
        "number = 117 if platform.machine() == 'aarch64' else 101\n"
        "read = 270 if platform.machine() == 'aarch64' else 310\n"
        "for pid in [1, os.getppid()]:\n"
        "    if pid != os.getpid() and (pid == 1 or 'bwrap' in open(f'/proc/{pid}/comm').read()):\n"
        "        found = libc.syscall(number, 16, pid, 0, 0)\n"
        "        print('REACHED ptrace' if found == 0 else 'refused', pid)\n"
        "        def memory():\n"
        "            with open(f'/proc/{pid}/mem', 'rb') as file:\n"
        "                return file.fileno()\n"
        "        attempt(f'memory of {pid}', memory) if pid == 1 else None\n",
        control=False,
    ),
    shell(
        "TIOCSTI",
        "processes",
        "types into the terminal that the agent was started from",
        "there is no controlling terminal",
        "exec 3<>/dev/tty && echo REACHED; ps -o tty= -p $$ | grep -e pts -e tty && echo REACHED; true",
        control=False,
    ),
    Case(
        "TIOCSTI in a terminal",
        "processes",
        "types into its own terminal, or one of the machine's",
        "a terminal of its own, into which only the holder types",
        _types,
    ),
    python(
        "descriptors",
        "processes",
        "open files until nobody can open any",
        "a bound holds for each process",
        "held = []\n"
        "import resource\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "try:\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n"
        "    while len(held) < 200_000:\n"
        "        held.append(os.open('/dev/null', os.O_RDONLY))\n"
        "except OSError as error:\n"
        "    print('refused after', len(held), error)\n"
        "else:\n"
        "    print('REACHED', len(held))\n",
        control=False,
    ),
    Case(
        "memory",
        "processes",
        "allocate until the machine swaps",
        "a bound holds for each process",
        _memory(),
    ),
    Case(
        "shared memory without a name",
        "processes",
        "what several processes share counts as nobody's",
        "the call that has too much of it is ended",
        _held_together("held = mmap.mmap(-1, 512 * MIB)\nheld[::4096] = b'x' * (512 * MIB // 4096)"),
    ),
    Case(
        "files in memory",
        "processes",
        "memfd_create, written to and mapped by nobody, is in no process's size",
        "the call that has too much of it is ended",
        _held_together("held = os.memfd_create('x')\nfor _ in range(512):\n    os.write(held, bytes(MIB))"),
    ),
    Case(
        "a little each",
        "processes",
        "many processes, each beneath its bound",
        "the call that has too much of it is ended",
        _held_together(
            "for _ in range(15):\n    if not os.fork():\n        break\nheld = bytearray(32 * MIB)\nheld[::4096] = b'x' * 8192"
        ),
    ),
    python(
        "the private /tmp",
        "processes",
        "fill the disk by way of /tmp",
        "it has a size of its own and counts as nothing of the machine's",
        "try:\n"
        "    with open('/tmp/fill', 'wb') as file:\n"
        "        for _ in range(600):\n"
        "            file.write(bytes(1 << 20))\n"
        "    print('REACHED 600 MiB in /tmp')\n"
        "except OSError as error:\n"
        "    print('refused', error)\n",
        control=False,
    ),
    python(
        "shared memory",
        "processes",
        "/dev/shm is memory",
        "it has a size of its own",
        "try:\n"
        "    with open('/dev/shm/fill', 'wb') as file:\n"
        "        for _ in range(300):\n"
        "            file.write(bytes(1 << 20))\n"
        "    print('REACHED 300 MiB in /dev/shm')\n"
        "except OSError as error:\n"
        "    print('refused', error)\n",
        control=False,
    ),
    python(
        "the longest file",
        "processes",
        "one file as long as the disk",
        "a file has a bound",
        "import signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "def longest():\n"
        "    with open('sparse', 'wb') as file:\n"
        "        file.truncate(1 << 40)\n"
        "    return os.path.getsize('sparse')\n"
        "attempt('1 TiB', longest)\n"
        "os.unlink('sparse')\n",
        control=False,
    ),
    python(
        "limits cannot be raised",
        "processes",
        "setrlimit back up",
        "hard limits stay",
        "import resource\n"
        "for name in ('RLIMIT_NPROC', 'RLIMIT_NOFILE', 'RLIMIT_FSIZE', 'RLIMIT_DATA', 'RLIMIT_CPU'):\n"
        "    kind = getattr(resource, name)\n"
        "    soft, hard = resource.getrlimit(kind)\n"
        "    print(f'REACHED {name} has no bound') if hard == resource.RLIM_INFINITY else None\n"
        "    attempt(name, lambda: resource.setrlimit(kind, (hard, hard + 1)))\n",
        control=False,
    ),
    Case(
        "fork bomb",
        "processes",
        "a few bytes that stop a machine",
        "bounded, and gone with its call",
        _fork_bomb,
        slow=True,
    ),
]
