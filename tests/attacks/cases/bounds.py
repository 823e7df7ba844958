"""Programs that exhaust the limits of a user, or kernel memory that no size limit counts."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import subprocess

from tests.attacks.case import Case, Probe, python
from tests.attacks.victim import VictimHome

_FLOODED = "flooded"
_HOLD = """
os.write(os.open("flooded", os.O_RDWR), b"x")
os.read(os.open("go", os.O_RDWR), 1)
"""
_FLOODS = {
    "inotify instances": "while libc.inotify_init1(0) >= 0 and attempts(): pass",
    "inotify instances of many processes": """
for child in range(64):
    if os.fork() == 0:
        while libc.inotify_init1(0) >= 0 and attempts(): pass
        signal.pause()
time.sleep(2)
""",
    "inotify watches": """
watcher = libc.inotify_init1(0)
os.mkdir("/tmp/watched")
for number in range(60_000):
    name = b"/tmp/watched/%d" % number
    os.mkdir(name)
    if libc.inotify_add_watch(watcher, name, 2) < 0:
        break
""",
    "timers": "while libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0 and attempts(): pass",
    "queued signals": """
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while libc.sigqueue(os.getpid(), 40, ctypes.c_void_p(1)) == 0 and attempts(): pass
""",
    "message queues": """
rt = ctypes.CDLL("librt.so.1")
while rt.mq_open(b"/%d" % limit[0], os.O_CREAT | os.O_RDWR, 0o600, None) >= 0 and attempts(): pass
""",
    "processes": """
for number in range(4096):
    try:
        if os.fork() == 0:
            signal.pause()
    except OSError:
        break
""",
}
_PROLOGUE = """
import ctypes, os, signal, time
libc = ctypes.CDLL(None, use_errno=True)
limit = [200_000]
def attempts():
    limit[0] -= 1
    return limit[0] > 0
"""


def _neighbour() -> list[str]:
    """Return what another process of the same user can no longer do."""
    library = ctypes.CDLL(None, use_errno=True)
    lacking: list[str] = []
    for what, get, give_back in (
        ("watch files", lambda: library.inotify_init1(0), os.close),
        ("open a terminal", lambda: os.open("/dev/ptmx", os.O_RDWR), os.close),
        ("make a timer", lambda: library.timer_create(1, None, ctypes.byref(ctypes.c_void_p())), None),
    ):
        found = get()
        if found < 0:
            lacking.append(what)
        elif give_back is not None:
            give_back(found)
    watcher = library.inotify_init1(0)
    if watcher >= 0:
        if library.inotify_add_watch(watcher, b"/", 2) < 0:
            lacking.append("add a watch")
        os.close(watcher)
    ends = os.pipe()
    if fcntl.fcntl(ends[0], fcntl.F_GETPIPE_SZ) < 65_536:
        lacking.append("make a whole pipe")
    for end in ends:
        os.close(end)
    library.mq_open.restype = ctypes.c_int
    queue = library.mq_open(b"/neighbour", os.O_CREAT | os.O_RDWR, 0o600, None)
    if queue < 0:
        lacking.append("make a message queue")
    else:
        os.close(queue)
        library.mq_unlink(b"/neighbour")
    try:
        subprocess.run(["/bin/true"], check=True)
    except (OSError, subprocess.SubprocessError):
        lacking.append("start a process")
    return lacking


def _flood(text: str) -> Probe:
    async def tried(home: VictimHome) -> str | None:
        loop = asyncio.get_running_loop()
        ways = [home.workspace / name for name in (_FLOODED, "go")]
        for way in ways:
            os.mkfifo(way)
        said, go = (os.open(way, os.O_RDWR | os.O_NONBLOCK) for way in ways)
        flooded = asyncio.Event()
        loop.add_reader(said, flooded.set)
        call = loop.create_task(home.python(_PROLOGUE + text + _HOLD))
        waiting = loop.create_task(flooded.wait())
        try:
            await asyncio.wait({call, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return f"the probe did not run to its end: {call.result()[-600:]!r}"
            lacking = _neighbour()
            os.write(go, b"x" * 256)
            await call
        finally:
            waiting.cancel()
            loop.remove_reader(said)
            for descriptor in (said, go):
                os.close(descriptor)
            for way in ways:
                way.unlink()
        return f"a neighbour of the same user cannot {', '.join(lacking)}" if lacking else None

    return tried


def _ended(text: str, why: str) -> Probe:
    """A flood that is to be ended, after which the neighbour is as before."""

    async def tried(home: VictimHome) -> str | None:
        said = await home.python(_PROLOGUE + text + "\nprint('REACHED its end')")
        if why not in said:
            return f"it was not ended for it: {said[-600:]!r}"
        lacking = _neighbour()
        return f"a neighbour of the same user cannot {', '.join(lacking)}" if lacking else None

    return tried


_SYSTEM_V = """
for way in (0o1600, 0o5600):
    attempt_size = 1 << 20
    for size in (attempt_size, (1 << 32) + 4096, 1 << 40):
        if libc.shmget(0, ctypes.c_size_t(size), way) >= 0:
            print("REACHED a segment", size)
if libc.msgget(0, 0o1600) >= 0:
    print("REACHED a message queue")
if libc.semget(0, 32_000, 0o1600) >= 0:
    print("REACHED a large set of semaphores")
total = 0
while libc.shmget(0, ctypes.c_size_t(65_536), 0o1600) >= 0:
    total += 65_536
    if total > 512 << 20:
        print("REACHED", total, "bytes in short segments")
        break
"""
_NO_SIZE = "files in /tmp and /dev/shm"
_FILES = {
    "empty files in /tmp": "open(f'/tmp/{n}', 'w').close()",
    "empty files in /dev/shm": "open(f'/dev/shm/{n}', 'w').close()",
    "empty folders in /tmp": "os.mkdir(f'/tmp/{n}')",
    "links in /tmp": "os.symlink('x' * 100, f'/tmp/{n}')",
    "pipes by name in /tmp": "os.mkfifo(f'/tmp/{n}')",
    "second names in /tmp": "(n or open('/tmp/0', 'w').close()) ; n and os.link('/tmp/0', f'/tmp/{n}')",
}


def _many_files(step: str) -> Probe:
    return _ended(f"for n in range(2_000_000):\n    {step}\n", _NO_SIZE)


_TERMINALS = """
import resource, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held = []
try:
    while True:
        held.append(os.open("/dev/ptmx", os.O_RDWR))
except OSError:
    time.sleep(20)
"""

_LONG_PIPES = """
import fcntl
ends = os.pipe()
try:
    fcntl.fcntl(ends[0], 1031, 1 << 20)
    print("REACHED a pipe of a mebibyte")
except OSError as error:
    print(error)
"""
_SECRET_MEMORY = 'syscall("memfd_secret", 447, 0)\n'

CASES = [
    *(
        Case(
            f"{name} used up",
            "processes",
            "a sandboxed program takes a bound that its whole user shares; editors fail",
            "a neighbour of the same user has its part",
            _flood(text),
        )
        for name, text in _FLOODS.items()
    ),
    *(
        Case(
            f"{name} without number",
            "processes",
            "what has no size fills the kernel's memory",
            "the call is ended",
            _many_files(step),
            slow=name != "empty files in /tmp",
        )
        for name, step in _FILES.items()
    ),
    Case(
        "terminals without number",
        "processes",
        "a sandboxed program takes all pseudo-terminals of the machine; its users cannot log in",
        "the call is ended",
        _ended(_TERMINALS, "pseudo-terminals"),
    ),
    python(
        "System V memory beyond its bound",
        "ipc",
        "segments, queues and semaphores that no bound of a call counts",
        "only short segments and small sets",
        _SYSTEM_V,
        control=False,
    ),
    python(
        "a pipe longer than the default",
        "processes",
        "all pipes of a user share one bound",
        "refused",
        _LONG_PIPES,
        harmless=True,
    ),
    python(
        "memory that nobody can see",
        "processes",
        "memfd_secret(2) is in no figure of a process",
        "refused",
        _SECRET_MEMORY,
        harmless=True,
    ),
]
