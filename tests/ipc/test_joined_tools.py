"""Tools of a joined process: callers get the same results as with tools of the holder."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pydantic
import pytest
from tests.arbiter.toolbox import kinds_of
from tests.ipc.workshop import joined, workshop

from handrail import LoadError, Runtime, ToolError, tool
from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.services.tool_runtime import QuestionOption, UserQuestion
from handrail.contract.text.strict_json import MAX_ARGUMENT_BYTES
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.contract.tool_generation import IN_PROCESS
from handrail.ipc.client.tool_host import describe_client_tools
from handrail.kernel.doctor import check_open_kernel
from handrail.testing.scripted_kernel import ScriptedApprovalHandler, temporary_kernel


class Forecast(pydantic.BaseModel):
    place: str
    celsius: float


@dataclasses.dataclass
class Pair:
    left: object
    right: object


class Odd:
    def __str__(self) -> str:
        raise ValueError("no text")


def _cycle() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


VALUES: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "text": lambda: "Grüße",
    "half a character": lambda: {"name": "\udc80"},
    "numbers": lambda: [1, 2.5, 2**63, 2**80, float("nan"), float("-inf")],
    "a tuple": lambda: (1, (2, 3)),
    "a set": lambda: {3, 1, 2},
    "keys": lambda: {1: "a", None: "b", "1": "c"},
    "bytes": lambda: b"\x00\xff",
    "an image": lambda: {"shot": Blob(b"\x89PNG", "image/png"), "more": [Blob(b"", "image/png")]},
    "one image": lambda: Blob(b"\x89PNG", "image/png"),
    "a model": lambda: Forecast(place="Bonn", celsius=21.5),
    "a dataclass": lambda: Pair(Pair(1, "x"), None),
    "a dataclass in a list": lambda: [Pair(1, 2)],
    "an object": lambda: [object],
    "an odd object": lambda: [Odd()],
    "itself": _cycle,
    "a result": lambda: Result.output({"n": 1}, pages=3, secretly=object),
    "an error": lambda: Result.error("limit", "too much", {"so far": Blob(b"x", "image/png")}, tried=2),
    "marks": lambda: {"$bytes": "aGk=", "blobs": [[1, {"a": 2}, ""]], "error": {"kind": "failed"}},
    "large": lambda: ["line"] * 30_000,
    "large and odd": lambda: [(n,) for n in range(5_000)],
}

FAILURES: dict[str, Callable[[], BaseException]] = {
    "a tool's": lambda: ToolError("out of paper; refill it", kind="unavailable", data={"pages": (1, 2)}),
    "a tool's without a kind": lambda: ToolError("x", kind="nonsense"),  # pyright: ignore[reportArgumentType]
    "a defect": lambda: ZeroDivisionError("by zero"),
    "its own class": lambda: type("PrinterError", (Exception,), {})("jam"),
    "an exit": lambda: SystemExit(3),
    "a cancellation of its own": asyncio.CancelledError,
}


@tool(id="make.value", side_effect="read", locks=[])
async def make(name: str) -> Any:
    """Make a value."""
    return VALUES[name]()


@tool(id="make.in_a_thread", side_effect="read", locks=[])
def make_in_a_thread(name: str) -> Any:
    """Make a value in a thread."""
    return VALUES[name]()


@tool(id="make.failure", side_effect="external", locks=[])
async def fail(name: str) -> None:
    """Fail."""
    raise FAILURES[name]()


@tool(id="make.failure_in_a_thread", side_effect="external", locks=[])
def fail_in_a_thread(name: str) -> None:
    """Fail in a thread."""
    raise FAILURES[name]()


async def both_ways(folder: Path, given: Any, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The result with the tool in the holder, and with the tool brought to it."""
    async with temporary_kernel(folder / "a", tools=[given], rules=[f"allow {given.spec.id}"]) as kernel:
        here = await (await kernel.session()).call(given.spec.id, arguments)
    async with workshop(folder / "b", given) as shop:
        there = await shop.session.call(given.spec.id, arguments)
    return _comparable(here), _comparable(there)


def _comparable(result: Result) -> dict[str, Any]:
    told = result.to_dict()
    del told["metadata"]["duration_ms"]
    if (path := told["metadata"].pop("output_path", None)) is not None:
        told["whole"] = Path(path).read_text()
    return told


@pytest.mark.proves("L-07")
@pytest.mark.parametrize("given", [make, make_in_a_thread], ids=["a coroutine", "a thread"])
@pytest.mark.parametrize("name", VALUES)
async def test_a_client_tool_returns_the_same_result_as_a_tool_of_the_holder(
    tmp_path: Path, name: str, given: Any
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here, there = await both_ways(tmp_path, given, {"name": name})
    assert there == here


@pytest.mark.parametrize("given", [fail, fail_in_a_thread], ids=["a coroutine", "a thread"])
@pytest.mark.parametrize("name", FAILURES)
async def test_a_client_tool_raises_the_same_error_as_a_tool_of_the_holder(
    tmp_path: Path, name: str, given: Any
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here, there = await both_ways(tmp_path, given, {"name": name})
    assert there == here
    assert "Traceback" not in str(there)


@pytest.mark.slow
async def test_an_oversized_output_returns_a_limit_error_and_the_connection_stays_open(tmp_path: Path) -> None:
    @tool(id="t.large", side_effect="external", locks=[])
    async def large(size: int) -> object:
        """Make bytes."""
        return Blob(bytes(size), "image/png")

    async with workshop(tmp_path, large) as shop:
        result = await shop.session.call("t.large", {"size": 110_000_000})
        assert result.error_kind == "limit"
        assert "`t.large` ran. The answer cannot be sent" in str(result.error_text)
        assert (await shop.session.call("t.large", {"size": 1})).ok


async def test_a_client_tool_has_the_same_definition_hash_and_llm_view_at_the_holder(tmp_path: Path) -> None:
    async with workshop(tmp_path, make) as shop:
        entry = shop.kernel.generation.entries["make.value"]
        assert entry.definition_hash == make.spec.definition_hash
        assert entry.spec.build_llm_view() == make.spec.build_llm_view()


async def test_results_and_doctor_label_a_client_tool_as_in_process_python(tmp_path: Path) -> None:
    async with workshop(tmp_path, make) as shop:
        result = await shop.session.call("make.value", {"name": "text"})
        assert result.metadata["sandbox"] == IN_PROCESS
        assert any("make.value" in str(check) for check in check_open_kernel(shop.kernel))
        assert "test_joined_tools.make" in shop.kernel.generation.entries["make.value"].source


async def test_the_holder_records_a_client_tools_call_before_and_after_the_run(tmp_path: Path) -> None:
    async with workshop(tmp_path, fail) as shop:
        await shop.session.call("make.failure", {"name": "a defect"})
        call = f"{shop.session.id}/1.0"
        assert await kinds_of(shop.kernel, call) == ["proposed", "authorised", "intended", "committed"]


async def test_arguments_of_a_client_tool_are_checked_before_sending(tmp_path: Path) -> None:
    async with workshop(tmp_path, make) as shop:
        assert (await shop.session.call("make.value", {"nam": "text"})).error_kind == "invalid_input"


async def test_arguments_of_a_client_tool_arrive_unchanged_or_are_refused(tmp_path: Path) -> None:
    heard: list[Any] = []

    @tool(id="t.hear", side_effect="external", locks=[])
    async def hear(value: Any) -> int:
        """Hear a value."""
        heard.append(value)
        return 1

    values: list[Any] = [
        None,
        "x" * (MAX_ARGUMENT_BYTES - 100),
        2**70,
        {"$bytes": "aGk="},
        [1, [2, {"a": None}]],
        "\x00é😀",
    ]
    async with workshop(tmp_path, hear) as shop:
        for value in values:
            assert (await shop.session.call("t.hear", {"value": value})).ok
        assert heard == values
        for unfit in ({1: "x"}, "x" * MAX_ARGUMENT_BYTES):
            assert (await shop.session.call("t.hear", {"value": unfit})).error_kind == "invalid_input"
        assert len(heard) == len(values)


async def test_a_value_returned_after_a_timeout_is_kept_as_in_the_holder(tmp_path: Path) -> None:
    @tool(id="t.late", side_effect="external", locks=[], timeout_ms=500)
    async def late() -> str:
        """Finishes what it does when told to end."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "tidied up"
        return "never"

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    here, there = await both_ways(tmp_path, late, {})
    assert there == here
    assert there["data"] == "tidied up"


# ── what is brought ──────────────────────────────────────────────────────────────────────────────


class Weather(Tool):
    spec = ToolSpec("weather.now", "The weather.", side_effect="read", locks=())
    closed = 0

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return {"session": runtime.session_id, "call": runtime.call_id}

    async def aclose(self) -> None:
        Weather.closed += 1


async def test_a_client_tool_class_works_and_its_object_is_closed_once(tmp_path: Path) -> None:
    Weather.closed = 0
    async with workshop(tmp_path, Weather) as shop:
        result = await shop.session.call("weather.now", {})
        assert result.data == {"session": shop.session.id, "call": f"{shop.session.id}/1.0"}
    assert Weather.closed == 1


def test_objects_that_are_not_tools_are_refused_with_the_decorator_to_add() -> None:
    def plain() -> None: ...

    with pytest.raises(LoadError, match="decorate it with @tool") as caught:
        describe_client_tools([plain, 3, make])
    assert len(caught.value.diagnostics) == 2


@pytest.mark.parametrize(
    "told",
    [
        {},
        "tools",
        [None],
        [{}],
        [{"spec": {}}],
        [{"spec": {"id": 3}, "definition": "", "source": "", "takes_runtime": True}],
        [{**describe_client_tools([make])[0], "definition": "0" * 64}],
        [{**describe_client_tools([make])[0], "spec": {**describe_client_tools([make])[0]["spec"], "sandbox": False}}],
        [
            {
                **describe_client_tools([make])[0],
                "spec": {**describe_client_tools([make])[0]["spec"], "side_effect": "none"},
            }
        ],
        [{**describe_client_tools([make])[0], "takes_runtime": 1}],
        [{**describe_client_tools([make])[0], "source": 1}],
    ],
)
async def test_a_faulty_tool_description_is_refused_and_leaves_the_tools_unchanged(told: Any) -> None:
    async with joined([make]) as both:
        before = both.brought.tools
        with pytest.raises(LoadError) as caught:
            both.brought.replace_tools(told)
        assert "process" in str(caught.value)
        assert both.brought.tools == before


async def test_a_replaced_client_tool_still_serves_turns_that_began_with_it(tmp_path: Path) -> None:
    @tool(id="t.version", side_effect="read", locks=[])
    async def first() -> str:
        """The first."""
        return "first"

    @tool(id="t.version", side_effect="read", locks=[])
    async def second() -> str:
        """The second."""
        return "second"

    async with workshop(tmp_path, first) as shop:
        turn = shop.session.start_turn()
        shop.bench.add_tools([second])
        await shop.kernel.reload_tools(shop.brought.replace_tools(describe_client_tools([second])))
        (old,) = await turn.call_all([("t.version", {})])
        assert old.result.data == "first"
        assert (await shop.session.call("t.version", {})).data == "second"


async def test_a_call_returns_unavailable_when_the_client_process_dropped_the_tool(tmp_path: Path) -> None:
    async with workshop(tmp_path, make) as shop:
        await shop.bench.aclose()
        result = await shop.session.call("make.value", {"name": "text"})
        assert result.error_kind == "unavailable"


# ── people are asked first ───────────────────────────────────────────────────────────────────────


class Deploy(Tool):
    spec = ToolSpec(
        "t.deploy",
        "Deploy.",
        {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]},
        Requires(capabilities=("ask",)),
        locks=(),
    )

    def questions(self, args: dict[str, Any]) -> list[UserQuestion]:
        if args["to"] == "nowhere":
            raise ToolError("there is no such place", kind="invalid_input")
        if args["to"] == "here":
            raise ZeroDivisionError("in the questions")
        return [UserQuestion(f"Deploy to {args['to']}?", "Deploy", (QuestionOption("yes"), QuestionOption("no")))]

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return await runtime.user.ask(self.questions(args))


async def test_a_client_tool_asks_its_questions_before_it_runs_and_receives_the_answers(tmp_path: Path) -> None:
    person = ScriptedApprovalHandler(answers=[[["yes"]]])
    async with workshop(tmp_path, Deploy, approval_handler=person) as shop:
        result = await shop.session.call("t.deploy", {"to": "Bonn"})
        assert result.data == [["yes"]]
        assert [asked.question for asked in person.questions] == ["Deploy to Bonn?"]
        kinds = await kinds_of(shop.kernel, f"{shop.session.id}/1.0")
        assert kinds.index("approval-requested") < kinds.index("intended")


async def test_an_error_while_a_client_tool_prepares_its_approval_fails_the_call(tmp_path: Path) -> None:
    async with workshop(tmp_path, Deploy, approval_handler=ScriptedApprovalHandler()) as shop:
        faulty = await shop.session.call("t.deploy", {"to": "nowhere"})
        assert (faulty.error_kind, faulty.error_text) == ("invalid_input", "there is no such place")
        assert (await shop.session.call("t.deploy", {"to": "here"})).error_kind == "backend"
        shop.theirs.drop("gone", quietly=True)
        assert (await shop.session.call("t.deploy", {"to": "Bonn"})).error_kind == "unavailable"
