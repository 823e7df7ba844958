"""A typed function becomes a tool."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import pytest
from pydantic import BaseModel, Field, field_validator

from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.errors import ToolError, UsageError
from handrail.contract.schema.argument_validation import compile_schema
from handrail.contract.tool.decorator import FunctionTool, tool
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ConfigKey, LockSpec, find_spec_faults
from handrail.contract.tool.tool_protocol import Tool, check_spec

if TYPE_CHECKING:
    from handrail.contract.services.tool_runtime import Runtime

RUNTIME = cast("Runtime", object())


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


class Address(BaseModel):
    street: str
    number: int = 1

    @field_validator("street")
    @classmethod
    def _some_street(cls, street: str) -> str:
        if street == "nowhere":
            raise ValueError("there is no such street")
        return street


@dataclasses.dataclass
class Size:
    width: int
    names: list[str]


async def run(made: FunctionTool[..., Any], **arguments: Any) -> Any:
    assert compile_schema(made.spec.parameters).list_problems(arguments) == []
    return await made.execute(arguments, RUNTIME)


@pytest.mark.proves("K-01")
async def test_a_bare_decorator_makes_a_tool_that_is_external_by_default() -> None:
    @tool
    async def add(a: int, b: int = 2) -> int:
        """Add two numbers."""
        return a + b

    assert isinstance(add, Tool)
    assert (add.spec.id, add.spec.description, add.spec.side_effect) == ("add", "Add two numbers.", "external")
    assert add.spec.parameters == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert find_spec_faults(add.spec) == []
    assert await run(add, a=1) == 3
    assert await add(1, 5) == 6


@pytest.mark.proves("K-01")
def test_every_decorator_option_is_set_in_the_spec() -> None:
    @tool(
        id="bank.transfer",
        side_effect="write",
        locks=["account:{source}:X", LockSpec("ledger", "S")],
        locks_background=["ledger:X"],
        requires={"fs": {"read": ["{workspace}"]}},
        targets={"fs.read": ["{source}"], "fs.write": "{source}"},
        timeout_ms=5,
        idempotent=True,
        concurrency_safe=False,
        promotable=True,
        mode="background",
        secrets=["key"],
        config={"region": ConfigKey("where")},
        max_output=10,
        max_entries=3,
        exposure="core",
        prompt_mask=True,
        version="2",
        category="money",
        tier="extra",
        kind="edit",
        guidance="Ask first.",
        documentation="All of it.",
    )
    async def transfer(source: str) -> None:
        """Move money."""

    spec = transfer.spec
    assert spec.locks == (LockSpec("account:{source}", "X"), LockSpec("ledger", "S"))
    assert spec.locks_background == (LockSpec("ledger", "X"),)
    assert spec.requires == Requires.model_validate({"fs": {"read": ["{workspace}"]}})
    assert (spec.id, spec.side_effect, spec.timeout_ms, spec.mode) == ("bank.transfer", "write", 5, "background")
    assert (spec.idempotent, spec.concurrency_safe, spec.promotable, spec.prompt_mask) == (True, False, True, True)
    assert (spec.max_output, spec.max_entries, spec.exposure, spec.version) == (10, 3, "core", "2")
    assert (spec.category, spec.tier, spec.kind) == ("money", "extra", "edit")
    assert (spec.guidance, spec.documentation, spec.secrets) == ("Ask first.", "All of it.", ("key",))
    assert spec.effective_targets == {"fs.read": ("{source}",), "fs.write": ("{source}",)}
    assert spec.config["region"].description == "where"


@pytest.mark.proves("K-01")
def test_a_missing_locks_option_gives_the_strict_default_and_an_empty_one_no_locks() -> None:
    @tool(side_effect="read")
    async def undeclared() -> None:
        """A."""

    @tool(locks=[])
    async def none() -> None:
        """A."""

    assert undeclared.spec.locks is None and undeclared.spec.effective_locks == (LockSpec("workspace", "S"),)
    assert none.spec.locks == ()


@pytest.mark.proves("K-01")
def test_descriptions_come_from_the_docstring_unless_the_annotation_has_one() -> None:
    @tool
    async def find(path: str, limit: Annotated[int, Field(ge=1, description="how many")] = 5) -> None:
        """Find files
        by name.

        Slow on large trees.

        Args:
            path: where to look
            limit: not this one
        """

    assert find.spec.description == "Find files by name."
    assert find.spec.documentation == "Slow on large trees."
    properties = find.spec.parameters["properties"]
    assert properties["path"]["description"] == "where to look"
    assert properties["limit"] == {"type": "integer", "minimum": 1, "description": "how many", "default": 5}


@pytest.mark.proves("K-01", "K-11a")
async def test_the_runtime_is_passed_to_the_function_and_left_out_of_the_schema() -> None:
    @tool
    async def by_annotation(a: int, around: Runtime) -> object:
        """A."""
        return [a, around is RUNTIME]

    @tool
    async def by_name(runtime: Any, a: int = 1) -> object:
        """A."""
        return [a, runtime is RUNTIME]

    for made in (by_annotation, by_name):
        assert list(made.spec.parameters["properties"]) == ["a"]
        assert await run(made, a=7) == [7, True]


@pytest.mark.proves("K-01")
async def test_models_dataclasses_enums_and_dates_are_built_from_the_checked_json() -> None:
    @tool
    async def order(
        address: Address,
        size: Size,
        colour: Colour = Colour.RED,
        day: datetime.date | None = None,
        several: list[Address] | None = None,
        level: Literal["low", "high"] = "low",
        pair: tuple[int, str] = (1, "x"),
    ) -> Result:
        """Order."""
        return Result.output([address, size, colour, day, several, level, pair])

    result = await run(
        order,
        address={"street": "s"},
        size={"width": 3, "names": ["n"]},
        colour="b",
        day="2020-02-29",
        several=[{"street": "t", "number": 2}],
        pair=[2, "y"],
    )
    assert result.data == [
        Address(street="s"),
        Size(3, ["n"]),
        Colour.BLUE,
        datetime.date(2020, 2, 29),
        [Address(street="t", number=2)],
        "low",
        (2, "y"),
    ]
    defaults = await run(order, address={"street": "s"}, size={"width": 3, "names": []})
    assert defaults.data[2:] == [Colour.RED, None, None, "low", (1, "x")]
    assert order.spec.parameters["properties"]["colour"]["default"] == "r"


@pytest.mark.proves("K-05")
def test_a_misspelt_key_inside_a_model_is_reported() -> None:
    @tool
    async def send(address: Address, size: Size) -> None:
        """Send."""

    schema = compile_schema(send.spec.parameters)
    found = schema.list_problems({"address": {"street": "s", "nummer": 2}, "size": {"width": 1, "names": [], "x": 1}})
    assert found == ["unknown argument `address.nummer` (did you mean `number`?)", *found[1:]]
    assert "unknown argument `size.x` (available: width, names)" in found


@pytest.mark.proves("K-05")
async def test_values_that_the_schema_cannot_check_are_checked_when_arguments_are_built() -> None:
    @tool
    async def send(address: Address, day: datetime.date) -> None:
        """Send."""

    with pytest.raises(ToolError) as caught:
        await run(send, address={"street": "nowhere"}, day="2021-02-30")
    assert caught.value.kind == "invalid_input"
    assert "address.street: Value error, there is no such street" in caught.value.text
    assert "day: " in caught.value.text
    assert "2021" not in caught.value.text


@pytest.mark.proves("K-01")
async def test_plain_json_arguments_reach_the_function_as_the_same_object() -> None:
    @tool
    async def echo(rows: list[dict[str, int]], anything: Any = None) -> bool:
        """Echo."""
        return rows is given

    given = [{"a": 1}]
    assert await run(echo, rows=given) is True


@pytest.mark.proves("K-01")
async def test_a_plain_function_runs_in_a_worker_thread_and_is_marked_as_blocking() -> None:
    @tool
    def where(a: int = 1) -> str:
        """Where."""
        return threading.current_thread().name

    @tool
    async def here() -> str:
        """Here."""
        return threading.current_thread().name

    assert where.blocking and not here.blocking
    assert await run(where) != threading.current_thread().name
    assert await run(here) == threading.current_thread().name
    assert where.run_in_current_thread({"a": 2}, RUNTIME) == threading.current_thread().name


async def test_return_values_with_a_json_form_are_converted_to_json() -> None:
    @tool
    async def model() -> Address:
        """A."""
        return Address(street="s")

    @tool
    async def size() -> Size:
        """A."""
        return Size(1, ["x"])

    @tool
    async def nothing() -> None:
        """A."""

    @tool
    async def picture() -> Blob:
        """A."""
        return Blob(b"x", "image/png")

    @tool
    async def other() -> object:
        """A."""
        return object()

    assert await run(model) == {"street": "s", "number": 1}
    assert await run(size) == {"width": 1, "names": ["x"]}
    assert await run(nothing) is None
    assert isinstance(await run(picture), Blob)
    with pytest.raises(ToolError, match="returned a value that is not JSON: object") as caught:
        await run(other)
    assert caught.value.kind == "backend"


async def test_methods_and_partials_can_be_made_into_tools() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        async def up(self, by: int) -> int:
            """Count up."""
            self.count += by
            return self.count

    async def scale(factor: int, value: int) -> int:
        """Scale."""
        return factor * value

    counter = Counter()
    up = tool(counter.up)
    double = tool(id="double")(functools.partial(scale, 2))
    assert await run(up, by=2) == 2
    assert await run(up, by=3) == 5
    assert await run(double, value=4) == 8
    assert double.spec.description == "Scale."


@pytest.mark.proves("K-01")
async def test_a_declared_schema_is_used_unchanged() -> None:
    declared = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 3}}, "required": ["n"]}

    @tool(parameters=declared)
    async def few(n, extra=1):  # type: ignore[no-untyped-def]  # pyright: ignore
        """Few."""
        return n + extra  # pyright: ignore

    assert few.spec.parameters is declared
    assert await run(few, n=2) == 3  # pyright: ignore[reportUnknownArgumentType]


def decorate(function: Callable[..., Any], **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        tool(**options)(function)
    return str(caught.value)


def test_a_function_that_json_arguments_cannot_fill_is_refused_with_advice() -> None:
    async def positional(a: int, /) -> None:
        """A."""

    async def several(*paths: str) -> None:
        """A."""

    async def anything(**options: str) -> None:
        """A."""

    async def untyped(a) -> None:  # type: ignore[no-untyped-def]  # pyright: ignore
        """A."""

    async def unknown(a: NoSuchThing) -> None:  # type: ignore[name-defined]  # pyright: ignore  # noqa: F821
        """A."""

    async def function(a: Callable[[], None]) -> None:
        """A."""

    async def field(a: int = Field(3)) -> None:
        """A."""

    async def two(a: Runtime, runtime: Runtime) -> None:
        """A."""

    async def silent(a: int) -> None: ...

    async def steps() -> Any:
        """A."""
        yield 1

    class Whole:
        """A."""

    assert "Remove the '/'" in decorate(positional)
    assert "paths: list[str]" in decorate(several)
    assert "Name each parameter" in decorate(anything)
    assert "'a' has no type annotation" in decorate(cast("Any", untyped))
    assert "'NoSuchThing' of 'a' cannot be resolved" in decorate(cast("Any", unknown))
    assert "cannot come from JSON" in decorate(function) or "no JSON form" in decorate(function)
    assert "Annotated[…, Field(…)]" in decorate(field)
    assert "both take the runtime" in decorate(two)
    assert "the docstring is missing" in decorate(silent)
    assert "a function with yield is a stateful tool" in decorate(steps)
    assert "subclass of handrail.Tool" in decorate(Whole)
    assert "Write @tool(id=…)" in decorate(lambda: None, description="A.")


def test_faulty_decorator_options_are_refused_with_a_suggestion() -> None:
    async def fine(a: int) -> None:
        """A."""

    assert "Did you mean 'side_effect'?" in decorate(fine, side_efect="read")
    assert "not a lock" in decorate(fine, locks=["workspace"])
    assert "`locks` must be a list" in decorate(fine, locks="workspace:X")
    said = decorate(fine, requires={"fs": {"raed": []}})
    assert "`requires` is invalid: fs.raed: unknown key; did you mean 'read'?" in said
    assert "`requires` is invalid: is 'fs'; expected" in decorate(fine, requires="fs")


def test_a_schema_that_does_not_fit_the_function_signature_is_refused() -> None:
    async def fine(a: int, b: int = 1) -> None:
        """A."""

    def declared(*names: str, **more: Any) -> dict[str, Any]:
        return {"type": "object", "properties": {n: {} for n in names}, "required": ["a"], **more}

    assert "describes 'c'" in decorate(fine, parameters=declared("a", "c"))
    assert "needs 'a'" in decorate(fine, parameters=declared("b"))
    assert "allows further arguments" in decorate(fine, parameters=declared("a", additionalProperties=True))


def test_tools_with_equal_parameters_share_their_compiled_schema() -> None:
    @tool
    def first(path: str, limit: int = 3) -> str:
        """Read."""
        return path

    @tool
    def second(path: str, limit: int = 3) -> str:
        """Write."""
        return path

    @tool
    def third(path: str, limit: int = 4) -> str:
        """Read."""
        return path

    found = [check_spec(one.spec).schema for one in (first, second, third)]
    assert found[0] is found[1] and found[0] is not found[2]
    assert all(one is not None and one.list_problems({"path": 1}) for one in found)


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (str, {"type": "string"}),
        (float | None, {"anyOf": [{"type": "number"}, {"type": "null"}]}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, bool], {"type": "object", "additionalProperties": {"type": "boolean"}}),
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (str | int, {"anyOf": [{"type": "string"}, {"type": "integer"}]}),
    ],
)
def test_a_shared_annotation_keeps_its_own_schema_and_description(annotation: Any, schema: Mapping[str, Any]) -> None:
    def make(text: str) -> Tool:
        def read(value: Any) -> None: ...

        read.__doc__ = f"Read.\n\n:param value: {text}"
        read.__annotations__["value"] = annotation
        return tool(read)

    for text in ("the first", "the second"):
        assert make(text).spec.parameters["properties"]["value"] == {**schema, "description": text}
