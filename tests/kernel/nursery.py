"""The program of the processes that share a workspace in :mod:`tests.kernel.handovers`."""

from __future__ import annotations

NURSERY = '''
import asyncio, contextlib, ctypes, faulthandler, gc, json, os, random, signal, sys, threading, time
from pathlib import Path
from handrail import open_kernel, tool
from handrail.kernel.local_kernel import LocalKernel
from handrail.sandbox.start import sandboxed_process
import handrail.kernel.remote_kernel, handrail.tools

folder, tasks_of_each = Path(sys.argv[1]), int(sys.argv[2])
effects = os.open(folder / "effects", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

@tool(id="soak.append", side_effect="external", locks=["file:{place}:X"])
async def append(place: str, mark: str) -> str:
    """Have an effect."""
    await asyncio.sleep(0)
    os.write(effects, (mark + "\\n").encode())
    await asyncio.sleep(0)
    return mark

@tool(id="soak.thread", side_effect="external", locks=["file:{place}:X"])
def thread(place: str, mark: str) -> str:
    """Have an effect, in a thread."""
    os.write(effects, (mark + "\\n").encode())
    return mark

@tool(id="soak.look", side_effect="read", locks=["file:{place}:S"])
async def look(place: str, mark: str) -> str:
    """Look."""
    return mark

TOOLS = [append, thread, look]
RULES = ["allow soak.*", "allow bash echo *", "allow bash tee -a trace"]

class Member:
    def __init__(self, name, seed, writer):
        self.name, self.writer, self.chance = name, writer, random.Random(seed)
        self.made = 0
        self.leaving = asyncio.Event()
        self.ending = False

    def say(self, word, **told):
        self.writer.write(json.dumps([word, told]).encode() + b"\\n")

    async def live(self):
        """Open a kernel and work with it, until it is told to leave or was replaced."""
        self.leaving.clear()
        options = {"state": folder / "state", "config": folder / "handrail.toml", "rules": RULES, "tools": TOOLS}
        async with open_kernel(folder / "ws", **options) as kernel:
            self.say("open", holds=isinstance(kernel, LocalKernel))
            await asyncio.gather(*(self.work(kernel, f"ses_{self.name.partition('-')[0]}_{n}") for n in range(tasks_of_each)))

    def token(self, kernel):
        return kernel.components.store.lease.token if isinstance(kernel, LocalKernel) else kernel.ipc_client.token

    async def work(self, kernel, session_id):
        session = await kernel.session(session_id)
        while not self.leaving.is_set():
            await self.step(kernel, session)
            if isinstance(kernel, LocalKernel) and kernel.components.store.lease.lost_reason:
                self.leaving.set()  # replaced while it was paused: "start it again"

    async def step(self, kernel, session):
        self.made += 1
        mark, kind = f"{self.name}.{self.made}", self.chance.randrange(40)
        if kind == 0:
            calls = [("bash", {"command": f"echo {mark} | tee -a trace"})]
        elif kind < 10:
            calls = [("soak.look", {"place": self.chance.choice("abcd"), "mark": mark})]
        elif kind < 13:
            calls = [("soak.thread", {"place": self.chance.choice("abcd"), "mark": mark})]
        else:
            calls = [("soak.append", {"place": self.chance.choice("abcd"), "mark": f"{mark}.{n}"})
                     for n in range(self.chance.choice((1, 1, 2, 3)))]
        marks = [arguments.get("mark", mark) for _, arguments in calls]
        began = time.monotonic_ns()
        self.say("proposed", marks=marks)
        if len(calls) == 1 and kind % 3 == 0:
            answers = [(f"{session.id}/key:{mark}", await session.call(*calls[0], key=mark))]
        else:
            answers = [(answer.call_id, answer.result) for answer in await session.start_turn().call_all(calls)]
        token = self.token(kernel)
        for (call_id, result), asked in zip(answers, marks, strict=True):
            told = result.to_dict()
            self.say("answered", mark=asked, call=call_id, result=told, token=token, began=began, ended=time.monotonic_ns())

    async def hear(self, reader):
        while line := await reader.readline():
            self.ending = line == b"end\\n"
            self.leaving.set()
        os._exit(0)  # the test is gone

def stand():
    """Say on standard error where everything in this process stands: asked for by a test that hangs."""
    faulthandler.dump_traceback(all_threads=True)
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stderr)
    sys.stderr.flush()

def open_files():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found

async def main(name, seed):
    reader, writer = await asyncio.open_unix_connection(str(folder / "told"))
    member = Member(name, seed, writer)
    member.say("born", name=name, pid=os.getpid())
    hearing = asyncio.create_task(member.hear(reader))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, stand)
    await asyncio.to_thread(int)  # the loop's own threads
    before = open_files()
    try:
        while not member.ending:
            await member.live()
    except BaseException as error:
        member.say("failed", error=f"{type(error).__name__}: {error}")
        raise
    # However long this machine takes to end the last processes and to put their namespaces away.
    patience = time.monotonic() + 120
    while True:
        await sandboxed_process.wait_until_sandboxes_dismantled()
        gc.collect()
        files = [path for number, path in open_files().items() if before.get(number) != path]
        tasks = [str(task) for task in asyncio.all_tasks() - {asyncio.current_task(), hearing}]
        threads = [each.name for each in threading.enumerate() if not each.name.startswith(("MainThread", "asyncio_"))]
        if not (any("/handrail/public-" not in path for path in files) or tasks or threads) or time.monotonic() > patience:
            break
        await asyncio.sleep(0.05)
    member.say("left", files=files, tasks=tasks, threads=threads)
    await writer.drain()
    hearing.cancel()
    writer.close()
    await writer.wait_closed()

gc.collect()
gc.freeze()
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # whatever is orphaned below this process becomes its child
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # and is not waited for one by one
print("ready", flush=True)
for line in sys.stdin:
    name, seed = line.split()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        status = 1
        try:
            asyncio.run(main(name, int(seed)))
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
try:
    os.wait()  # with SIGCHLD ignored: returns when the last child is gone
except ChildProcessError:
    print("alone", flush=True)
'''
