"""Attempts to run a call without an approval."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.attacks.case import Case, breach
from tests.attacks.victim import SECRET, AgreeingUser, VictimHome, put

from handrail import tool
from handrail.contract.approval_requests import ApprovalAnswer, ApprovalRequest
from handrail.contract.errors import HandrailError
from handrail.policy.watchdogs.api import WatchdogCall


class FixedAnswerUser(AgreeingUser):
    """A user who gives the same answer to everything."""

    def __init__(self, choice: Any) -> None:
        super().__init__()
        self._choice = choice

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        self.requests.append(request)
        return ApprovalAnswer(self._choice)


async def _literal_star(home: VictimHome) -> str | None:
    """A rule stored by "always for this project" matches only that command in another process."""
    async with home.elsewhere() as (_, workspace):
        async with home.kernel(workspace=workspace, name="stored") as kernel:
            session = await kernel.session(approval_handler=FixedAnswerUser("project"))
            for command in ("mkdir -p '*'", "mkdir -p '?'", "mkdir '-p' '[a-z]'"):
                if not (await session.call("bash", {"command": command})).ok:
                    return f"{command} was not answered"
        async with home.kernel(workspace=workspace, name="stored") as kernel:
            session = await kernel.session()
            same = await session.call("bash", {"command": "mkdir -p '*'"})
            others = [
                "mkdir -p x",
                "mkdir -p '**'",
                "mkdir -p b",
                "mkdir '-p' q",
                "mkdir -p '*' x",
                "mkdir -p '*'; mkdir y",
                "mkdir",
            ]
            ran = [text for text in others if (await session.call("bash", {"command": text})).ok]
    return breach(ran, "ran on a stored rule") if same.ok else f"the stored rule answers nothing: {same!r}"[:400]


class SlowUser(AgreeingUser):
    """A user who reads the script before approving it."""

    def __init__(self, workspace: Path, script: str) -> None:
        super().__init__()
        self._script = workspace / script
        self._go = workspace / "go"

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        if "work.py" not in str(request.arguments):
            read = self._script.read_text()
            self._go.touch()
            async with asyncio.timeout(60):
                while self._script.read_text() == read:
                    await asyncio.sleep(0.02)
        return await super().approve(request)


_REWRITES = """\
import os, time
end = time.monotonic() + 60
open("running", "w").close()
while not os.path.exists("go") and time.monotonic() < end:
    time.sleep(0.01)
with open(SCRIPT, "w") as file:
    file.write("echo REACHED")
"""
_APPROVED = {
    "sh run.sh": "run.sh",
    "cd sub && timeout 5 sh ./run.sh": "sub/run.sh",
    "make": "Makefile",
    "python3 -m pkg": "pkg/__main__.py",
}


async def _rewritten(home: VictimHome) -> str | None:
    """A background program rewrites a file that the user has just read and is about to approve."""
    for command, script in _APPROVED.items():
        async with home.elsewhere() as (_, workspace):
            put(workspace / script, "# harmless\n")
            put(workspace / "work.py", _REWRITES.replace("SCRIPT", repr(script)))
            async with home.kernel(workspace=workspace, name="rewritten") as kernel:
                session = await kernel.session(approval_handler=SlowUser(workspace, script))
                begun = await session.call("bash", {"command": "python3 work.py", "background": True})
                while begun.ok and not (workspace / "running").exists():
                    await asyncio.sleep(0.02)
                result = await session.call("bash", {"command": command})
                if result.error_kind != "conflict" or not all(
                    word in (result.error_text or "") for word in (script, "have changed since its approval")
                ):
                    return f"{command}: {result!r}"[:600]
    return None


async def _once_is_once(home: VictimHome) -> str | None:
    person = FixedAnswerUser("once")
    async with home.kernel(name="once") as kernel:
        session = await kernel.session(approval_handler=person)
        for _ in range(3):
            await session.call("bash", {"command": "mkdir -p once"})
    return None if len(person.requests) == 3 else f"asked {len(person.requests)} times for 3 calls"


async def _parallel(home: VictimHome) -> str | None:
    """Each of several calls that ask is asked about; each answer is for its own; each runs once or never."""
    ran: list[int] = []

    @tool(id="step", side_effect="external", locks=[])
    async def step(number: int) -> int:
        """Step."""
        ran.append(number)
        return number

    class Picking(AgreeingUser):
        async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
            self.requests.append(request)
            number = int(request.arguments["number"])
            for _ in range(10 - number):  # answered in another order than asked
                await asyncio.sleep(0)
            return ApprovalAnswer("once" if number % 2 == 0 else "reject")

    person = Picking()
    async with home.kernel(name="parallel", tools=[step]) as kernel:
        session = await kernel.session(approval_handler=person)
        answers = await session.call_all([("step", {"number": number}) for number in range(8)])
    results: list[Any] = [getattr(answer, "result", answer) for answer in answers]
    told = [result.data if result.ok else result.error_kind for result in results]
    wanted = [number if number % 2 == 0 else "denied" for number in range(8)]
    if told != wanted or sorted(ran) != [0, 2, 4, 6] or len(person.requests) != 8:
        return f"answered {told}, ran {ran}, asked {len(person.requests)} times"
    return None


async def _shown_whole(home: VictimHome) -> str | None:
    person = FixedAnswerUser("reject")
    async with home.kernel(name="whole") as kernel:
        session = await kernel.session(approval_handler=person)
        command = "echo " + "a " * 20_000 + "&& rm -rf last"
        await session.call("bash", {"command": command})
    shown = person.requests[0].arguments.get("command") if person.requests else None
    return None if shown == command else f"shown were {len(str(shown))} of {len(command)} characters"


async def _nothing_to_check(home: VictimHome) -> str | None:
    """An empty list of commands, and one longer than anybody reads, is not "nothing to object to"."""
    ran: list[str] = []
    async with home.kernel(name="empty", rules=["allow bash true", "allow bash echo *"]) as kernel:
        session = await kernel.session()
        for text in (
            "",
            " ",
            "\n",
            "#",
            "# x",
            ";",
            "&&",
            "()",
            "{}",
            "''",
            '""',
            "\\",
            "; ".join(["true"] * 51),
            "\n".join(["echo x"] * 500),
        ):
            result = await session.call("bash", {"command": text})
            if result.ok:
                ran.append(repr(text[:30]))
    return breach(ran, "ran")


async def _numbers(home: VictimHome) -> str | None:
    """``kill -9`` where ``-9`` is read as a number, and an argument vanishes from the check."""
    ran: list[str] = []
    async with home.kernel(name="numbers", rules=["allow bash kill *", "allow bash touch 1 *"]) as kernel:
        session = await kernel.session()
        for text in (
            "kill -9 -1",
            "kill -9 1",
            "kill '-9' 1",
            "kill -KILL -- -1",
            "touch -c 1",
            "touch 1 -c",
            "touch -1",
        ):
            result = await session.call("bash", {"command": text})
            if result.ok:
                ran.append(text)
    return breach(ran, "ran")


async def _rules_that_cannot_match(home: VictimHome) -> str | None:
    """Silently useless rules, a deny above all, stop the start."""
    taken: list[str] = []
    for rule in ("deny bsh rm *", "deny fs.wirte **", "deny fs.write ../x", "deny net.fetch 0x7f.1", "deny net.fetch http://x/",
                 "block bash", "deny", "deny bash 'rm", "deny mcp:x"):  # fmt: skip
        try:
            async with home.kernel(name="faulty", rules=[rule]):
                taken.append(rule)
        except HandrailError:
            pass
    return breach(taken, "taken without a word")


async def _failing_watchdog(home: VictimHome) -> str | None:
    """A policy engine whose failure means allow."""

    def raises(_: WatchdogCall) -> Any:
        raise RuntimeError("broken")

    def leaves(_: WatchdogCall) -> Any:
        raise SystemExit(0)

    async def never(_: WatchdogCall) -> Any:
        await asyncio.Event().wait()

    never.timeout_ms = 50  # pyright: ignore[reportFunctionMemberAccess]

    async def cancels(_: WatchdogCall) -> Any:
        raise asyncio.CancelledError

    def saying(value: object) -> Any:
        def says(_: WatchdogCall) -> object:
            return value

        return says

    odd: tuple[object, ...] = (None, True, 1, "yes", "ALLOW", {}, ["allow"])
    watchdogs: list[Any] = [raises, leaves, never, cancels, *map(saying, odd)]
    ran: list[str] = []
    for number, watchdog in enumerate(watchdogs):
        async with home.kernel(name="watched", rules=["allow bash true"], watchdogs=[watchdog]) as kernel:
            session = await kernel.session(approval_handler=AgreeingUser())
            result = await session.call("bash", {"command": "true"})
            if result.ok or result.error_kind != "denied":
                ran.append(f"{number}: {result!r}"[:200])
    return breach(ran, "allowed")


async def _deny_is_final(home: VictimHome) -> str | None:
    """A deny of the agent's manifest: neither session rules nor an approval override it."""
    agent = 'rules = ["deny bash touch *", "deny fs.write src/**"]\n'
    async with home.kernel(
        name="final", agent=agent, rules=["allow bash", "allow bash touch x", "allow fs.write src/a.py"]
    ) as kernel:
        session = await kernel.session(approval_handler=AgreeingUser(), rules=["allow bash touch x", "allow *"])
        one = await session.call("bash", {"command": "touch x"})
        two = await session.call("write", {"path": "src/a.py", "content": "x"})
        three = await session.call("bash", {"command": "echo x > src/a.py"})
    return breach([r for r in (one, two, three) if r.error_kind != "denied"], "not denied")


async def _changed_by_approver(home: VictimHome) -> str | None:
    """Arguments that the user changes are checked again: a deny still applies."""

    class Changing(AgreeingUser):
        async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
            if self.requests:
                return ApprovalAnswer("reject")
            self.requests.append(request)
            return ApprovalAnswer("once", arguments={"command": "cat /etc/passwd > ../out; touch denied"})

    async with home.kernel(name="changed", rules=["deny bash touch *"]) as kernel:
        session = await kernel.session(approval_handler=Changing())
        result = await session.call("bash", {"command": "mkdir made"})
    there = (home.workspace / "denied").exists()
    return f"{result!r}" if result.ok or there else None


async def _tools_call_tools(home: VictimHome) -> str | None:
    """A call that a tool makes has no more than its caller, and is decided like any other."""

    @tool(id="outer.call", side_effect="external")
    async def outer_call(runtime: Any) -> str:
        """Call bash."""
        calls = getattr(runtime, "calls", None)
        if calls is None:
            return "no door"
        result = await calls.call("bash", {"command": f"cat /home/victim/.ssh/* ; echo {SECRET[:3]}"})
        return repr(result)

    async with home.kernel(name="nested", tools=[outer_call], rules=["allow outer.call"]) as kernel:
        session = await kernel.session()
        result = await session.call("outer.call", {})
    return f"{result!r}"[:400] if f"{SECRET}-SSH" in repr(result) or "'exit_code': 0" in repr(result) else None


CASES: list[Case] = [
    Case(id, "permission", source, expected, tried)
    for id, source, expected, tried in (
        ("a literal star", "an approval stored with a literal * comes back as a wildcard", "it is that star", _literal_star),
        ("once", "allow once keyed by the tool's name", "asked each time", _once_is_once),
        ("an approved script", "a script is rewritten after a person has read it", "the call is refused", _rewritten),
        ("parallel approvals", "only the first surfaced, answers went to the wrong call, siblings ran twice",
         "each asked, answered and run for itself", _parallel),
        ("a long command", "approved text cut at 80 characters", "shown whole", _shown_whole),
        ("nothing to check", "an empty list of patterns meant allow; over 50 commands fell through", "denied", _nothing_to_check),
        ("numbers", "an argument vanished from the check", "judged like other words", _numbers),
        ("rules that can never match", "silently useless", "the start is refused", _rules_that_cannot_match),
        ("a watchdog that fails", "a policy engine whose failure means allow", "denied", _failing_watchdog),
        ("a manifest's deny", "a rule of a lower scope lifts it", "final", _deny_is_final),
        ("changed by the approver", "new arguments that nobody judged", "judged again", _changed_by_approver),
        ("tools that call tools", "a confused deputy", "no more than the caller has", _tools_call_tools),
    )
]  # fmt: skip
