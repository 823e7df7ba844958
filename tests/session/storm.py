"""A storm of calls: all actions of models, tools, users and callers at once, and the invariants after it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from handrail import ApprovalAnswer, ApprovalRequest, Result, Runtime, ToolError, tool
from handrail.contract.calls_and_results import CallAnswer, ProposedCall
from handrail.kernel.local_kernel import LocalKernel
from handrail.record.verification import verify_log
from handrail.session.local_session import LocalSession
from handrail.store.tables.approval_tables import ApprovalReader

RULES = ["allow storm.*", "ask storm.asked"]
SETTINGS = "[limits]\ngrace_ms = 5\nlock_wait_ms = 2000\n"

_ENDS = ("committed", "rejected")
_STEPS = {"proposed": 0, "approval-requested": 1, "approval-responded": 2, "authorised": 3, "intended": 4}


class RandomPauses:
    """Seeded waits of a few turns of the event loop or a fraction of a millisecond."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    async def some(self) -> None:
        for _ in range(self.random.randrange(4)):
            await asyncio.sleep(self.random.choice((0, 0, 0, 0.0005)))


pauses = RandomPauses()
effects: Counter[str] = Counter()


@tool(id="storm.read", side_effect="read", locks=["file:{name}:S"])
async def read(name: str) -> str:
    """Read."""
    await pauses.some()
    return name


@tool(id="storm.quick", side_effect="read", locks=[])
async def quick() -> str:
    """Read at once."""
    return "quick"


@tool(id="storm.write", side_effect="write", locks=["file:{name}:X"])
async def write(name: str, mark: str) -> str:
    """Write."""
    await pauses.some()
    effects[mark] += 1
    return name


@tool(id="storm.fail", side_effect="external", locks=["file:{name}:X"])
async def fail(name: str, how: int) -> str:
    """Fail."""
    await pauses.some()
    match how:
        case 0:
            raise ToolError("out of paper")
        case 1:
            raise RuntimeError("a defect")
        case 2:
            raise SystemExit(1)
        case _:
            gone = asyncio.get_running_loop().create_future()
            gone.cancel()
            return await gone


@tool(id="storm.slow", side_effect="read", locks=["file:{name}:S"], timeout_ms=3)
async def slow(name: str, runtime: Runtime) -> str:
    """Take too long."""
    runtime.set_partial_result(name)
    await asyncio.Event().wait()
    return name


@tool(id="storm.swallow", side_effect="external", locks=["file:{name}:X"], timeout_ms=3)
async def swallow(name: str, times: int) -> str:
    """Swallow some cancellations."""
    for _ in range(times):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.002)
    return name


@tool(id="storm.swallow_read", side_effect="read", locks=["file:{name}:S"], timeout_ms=3)
async def swallow_read(name: str, times: int) -> str:
    """Swallow some cancellations."""
    for _ in range(times):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.002)
    return name


@tool(id="storm.thread", side_effect="external", locks=["file:{name}:X"], timeout_ms=3)
def thread(name: str, ms: int) -> str:
    """Hold a thread for a while."""
    threading.Event().wait(ms / 1000)
    return name


@tool(id="storm.asked", side_effect="external", locks=["file:{name}:X"])
async def asked(name: str, mark: str) -> str:
    """Have an effect that a person is asked about."""
    effects[mark] += 1
    return name


@tool(id="storm.nest", side_effect="external", locks=["file:{name}:X"], requires={"capabilities": ["call"]})
async def nest(name: str, inner: int, runtime: Runtime) -> list[str | None]:
    """Call other tools."""
    calls: list[tuple[str, dict[str, Any]]] = [
        ("storm.read", {"name": name}),
        ("storm.read", {"name": "elsewhere"}),
        ("storm.fail", {"name": name, "how": inner % 4}),
        ("storm.slow", {"name": name}),
        ("storm.unknown", {}),
        ("storm.asked", {"name": name, "mark": "never"}),
    ]
    if inner % 2:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(runtime.call(*call)) for call in calls[:inner]]
        results = [task.result() for task in tasks]
    else:
        results = [await runtime.call(*call) for call in calls[:inner]]
    return [result.error_kind for result in results]


@tool(id="storm.detach", side_effect="external", locks=["file:{name}:X"], requires={"capabilities": ["call"]})
async def detach(name: str, runtime: Runtime) -> str:
    """Leave a call behind."""
    task = asyncio.ensure_future(runtime.call("storm.read", {"name": name}))
    _left.add(task)
    task.add_done_callback(_left.discard)
    await pauses.some()
    return name


_left: set[asyncio.Future[Result]] = set()

TOOLS = (read, quick, write, fail, slow, swallow, swallow_read, thread, asked, nest, detach)


class RandomUser:
    """Answers at leisure, at random, and sometimes fails to."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        await pauses.some()
        match self.chance.randrange(4):
            case 0:
                return ApprovalAnswer("reject", "no")
            case 1:
                raise RuntimeError("the window was closed")
            case _:
                return ApprovalAnswer("once")

    async def answer_questions(self, session_id: str, questions: Any) -> list[list[str]]:
        return [[""] for _ in questions]


class RandomCalls:
    """Seeded: the same number makes the same calls, stops and answers in the same order."""

    def __init__(self, kernel: LocalKernel, seed: int) -> None:
        self.kernel = kernel
        self.chance = random.Random(seed)
        pauses.random = random.Random(seed + 1)
        self.sessions: list[LocalSession] = []
        self.answered: Counter[str] = Counter()
        self.cancelled = 0
        self.made = 0
        self.kinds: Counter[str] = Counter()

    async def blow(self, calls: int) -> None:
        """Make about this many calls, then wait for all of them."""
        for _ in range(3):
            self.sessions.append(await self.kernel.session(approval_handler=RandomUser(self.chance)))
        self.sessions.append(await self.kernel.session())
        callers: set[asyncio.Task[None]] = set()
        while self.made < calls:
            session = self.chance.choice(self.sessions)
            caller = asyncio.create_task(self._caller(session))
            callers.add(caller)
            match self.chance.randrange(30):
                case 0:
                    session.cancel_running_calls(self.chance.choice(("user", "shutdown")))
                case 1 | 2:
                    self.chance.choice(tuple(callers)).cancel()
                case 3:
                    caller.cancel()
                case _:
                    pass
            await pauses.some()
            while len(callers) > 12:
                done, callers = await asyncio.wait(callers, return_when=asyncio.FIRST_COMPLETED)
                self._finished(done)
        while callers:
            done, callers = await asyncio.wait(callers)
            self._finished(done)
        while _left:
            await asyncio.wait(_left)
        await self.kernel.components.arbiter.tool_runner.wait_for_late_work()

    def _finished(self, callers: set[asyncio.Task[None]]) -> None:
        for caller in callers:
            if caller.cancelled():
                self.cancelled += 1
            else:
                caller.result()

    async def _caller(self, session: LocalSession) -> None:
        match self.chance.randrange(6):
            case 0:
                name, arguments = self._proposal()
                self.made += 1
                result = await session.call(name, arguments)
                self.kinds[result.error_kind or "output"] += 1
            case 1:
                self.made += 1
                key = f"k{self.chance.randrange(5)}"
                result = await session.call("storm.write", {"name": "keyed", "mark": f"{session.id}-{key}"}, key=key)
                self.kinds[result.error_kind or "output"] += 1
            case 2:
                async with contextlib.AsyncExitStack() as stack:
                    stack.enter_context(contextlib.suppress(TimeoutError))
                    await stack.enter_async_context(asyncio.timeout(self.chance.choice((0, 0.001, 0.003))))
                    await self._reply(session)
            case _:
                await self._reply(session)
        assert not asyncio.current_task().cancelling()  # type: ignore[union-attr]

    async def _reply(self, session: LocalSession) -> None:
        proposals = [self._proposed() for _ in range(self.chance.randrange(1, 9))]
        self.made += len(proposals)
        answers = await session.start_turn().call_all(proposals)
        assert len(answers) == len(proposals)
        assert [int(answer.call_id.rpartition(".")[2]) for answer in answers] == list(range(len(answers)))
        for proposal, answer in zip(proposals, answers, strict=True):
            self._take(proposal, answer)

    def _take(self, proposal: ProposedCall, answer: CallAnswer) -> None:
        self.answered[answer.call_id] += 1
        self.kinds[answer.result.error_kind or "output"] += 1
        assert answer.tool_id == proposal.name
        if answer.result.ok and isinstance(proposal.arguments, Mapping) and "name" in proposal.arguments:
            assert answer.result.data == proposal.arguments["name"] or proposal.name == "storm.nest"

    def _proposed(self) -> ProposedCall:
        name, arguments = self._proposal()
        return ProposedCall(name, arguments, f"call_{self.chance.randrange(3)}")

    def _proposal(self) -> tuple[str, Mapping[str, Any] | str]:
        chance = self.chance
        name = chance.choice("abcd")
        mark = f"m{chance.getrandbits(64)}"
        some: list[tuple[str, Mapping[str, Any] | str]] = [
            ("storm.read", {"name": name}),
            ("storm.quick", {}),
            ("storm.write", {"name": name, "mark": mark}),
            ("storm.fail", {"name": name, "how": chance.randrange(4)}),
            ("storm.slow", {"name": name}),
            ("storm.swallow", {"name": name, "times": chance.randrange(6)}),
            ("storm.swallow_read", {"name": name, "times": chance.randrange(6)}),
            ("storm.thread", {"name": name, "ms": chance.randrange(12)}),
            ("storm.asked", {"name": name, "mark": mark}),
            ("storm.nest", {"name": name, "inner": chance.randrange(7)}),
            ("storm.detach", {"name": name}),
            ("storm.unknown", {"name": name}),
            ("storm.read", {"nome": name}),
            ("storm.read", '{"name": "' + name),
            ("", "{}"),
        ]
        return chance.choice(some)

    async def held(self, tasks_before: int) -> None:
        """Check the invariants after the storm."""
        arbiter = self.kernel.components.arbiter
        assert set(self.answered.values()) <= {1}
        assert arbiter.locks.active_resource_count == 0
        for session in self.sessions:
            assert session._lane.running_calls == {}  # pyright: ignore[reportPrivateUsage]
            assert session._keys == {}  # pyright: ignore[reportPrivateUsage]
        while len(asyncio.all_tasks()) > tasks_before or _tool_threads():
            await asyncio.sleep(0.01)  # a thread's last word comes through the event loop
        assert len(asyncio.all_tasks()) == tasks_before
        await self.kernel.log.flush()
        reader = self.kernel.log.reader
        assert verify_log(reader).ok
        assert reader.list_unfinished_intents() == []
        records: dict[str, list[tuple[str, bool]]] = {}
        for record in reader.records():
            assert "defect" not in (record.body or {}), record
            if record.call_id:
                late = bool((record.body or {}).get("late"))
                records.setdefault(record.call_id, []).append((record.kind, late))
        asked = ApprovalReader(self.kernel.components.store.database.shared_read_connection)
        parked = {a.request.call_id for session in self.sessions for a in asked.list_unresolved_requests(session.id)}
        for call_id, steps in records.items():
            if call_id in parked:  # by a shutdown: it goes on, or waits, when its session is opened again
                assert steps[-1][0] in ("approval-requested", "approval-responded", "authorised"), (call_id, steps)
            else:
                check_steps(call_id, steps)
        assert set(self.answered) <= set(records)
        assert all(count == 1 for mark, count in effects.items() if mark != "never") and effects["never"] == 0


def check_steps(call_id: str, steps: list[tuple[str, bool]]) -> None:
    """One call's records: in the order of the steps, one end, and at most one late word after it."""
    kinds = [kind for kind, late in steps if not late]
    if "/key:" in call_id:  # may be tried again after a refusal that could pass
        while "rejected" in kinds[:-1]:
            kinds = kinds[kinds.index("rejected") + 1 :]
    assert kinds[0] == "proposed", (call_id, steps)
    assert kinds[-1] in _ENDS and sum(kind in _ENDS for kind in kinds) == 1, (call_id, steps)
    assert kinds[-1] == "rejected" or "intended" in kinds, (call_id, steps)
    order = [_STEPS[kind] for kind in kinds[:-1]]
    assert order == sorted(set(order)), (call_id, steps)
    assert sum(late for _, late in steps) <= 1, (call_id, steps)


def _tool_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("handrail-storm")]


async def storm(kernel: LocalKernel, seed: int, calls: int) -> RandomCalls:
    """One storm, and the proof that it left nothing behind."""
    effects.clear()
    before = len(asyncio.all_tasks())
    complaints: list[Mapping[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    one = RandomCalls(kernel, seed)
    await one.blow(calls)
    await one.held(before)
    assert complaints == [], complaints
    return one
