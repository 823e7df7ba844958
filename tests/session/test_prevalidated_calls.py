"""The submitted call runs as submitted, whatever happened since its prevalidation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from handrail import tool
from handrail.arbiter.lock_table import LockResolver
from handrail.contract.calls_and_results import CallAnswer
from handrail.contract.text.strict_json import MAX_ARGUMENT_BYTES
from handrail.contract.tool.requires import CapabilityLayer
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("X-09")


@tool(
    id="test.put",
    side_effect="write",
    locks=["file:{path}:X"],
    targets={"fs.write": "{path}"},
    requires={"fs": {"write": ["{workspace}"]}},
)
async def put(path: str, text: str = "", n: int = 0) -> dict[str, Any]:
    """Would open the file itself, where nobody judges it again."""
    return {"path": path, "length": len(text), "n": n}


def denied(answer: CallAnswer) -> bool:
    return answer.result.error_kind == "denied"


async def test_arguments_changed_after_prevalidation_are_checked_again(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[put], rules=["allow test.put", "deny fs.write secret"]) as kernel:
        turn = (await kernel.session()).start_turn()
        arguments = {"path": "plain"}
        turn.prepare_likely_call(("test.put", arguments))
        arguments["path"] = "secret"
        assert denied(await turn.start_streamed_call(("test.put", arguments)))


async def test_arguments_that_compare_equal_but_differ_in_type_are_validated_again(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=[put], rules=["allow test.put"]) as kernel:
        turn = (await kernel.session()).start_turn()
        turn.prepare_likely_call(("test.put", {"path": "a", "n": 1}))
        answer = await turn.start_streamed_call(("test.put", {"path": "a", "n": True}))
    assert answer.result.error_kind == "invalid_input"


async def test_arguments_over_the_limit_are_refused_after_a_call_was_prepared(tmp_path: Path) -> None:
    call = ("test.put", '{"path":"a","text":"' + "\u4e00" * (MAX_ARGUMENT_BYTES // 3) + '"}')
    async with temporary_kernel(tmp_path, tools=[put], rules=["allow test.put"]) as kernel:
        turn = (await kernel.session()).start_turn()
        turn.prepare_likely_call(call)
        answer = await turn.start_streamed_call(call)
    assert answer.result.error_kind == "invalid_input" and "The limit is" in str(answer.result.error_text)


async def test_a_capability_layer_added_after_prevalidation_applies_to_the_call(tmp_path: Path) -> None:
    call = ("test.put", '{"path":"a"}')
    async with temporary_kernel(tmp_path, tools=[put], rules=["allow test.put"]) as kernel:
        session = await kernel.session()
        turn = session.start_turn()
        turn.prepare_likely_call(call)
        session._lane.authority.replace_capability_layer(CapabilityLayer("another agent"))  # pyright: ignore[reportPrivateUsage]
        assert denied(await turn.start_streamed_call(call))


@pytest.mark.parametrize("secrets", [None, {"TOKEN": "something-else"}])
@pytest.mark.parametrize("ahead", [True, False])
async def test_a_watcher_that_changes_an_event_does_not_change_the_call(
    tmp_path: Path, ahead: bool, secrets: dict[str, str] | None
) -> None:
    call = ("test.put", '{"path":"a","n":1}')
    async with temporary_kernel(tmp_path, tools=[put], rules=["allow test.put"], secrets=secrets) as kernel:
        session = await kernel.session()
        session.watch_events(lambda event: cast("dict[str, Any]", event.data).get("arguments", {}).clear())
        turn = session.start_turn()
        if ahead:
            turn.prepare_likely_call(call)
        answer = await turn.start_streamed_call(call)
    assert answer.result.data == {"path": "a", "length": 0, "n": 1}


async def test_the_call_reports_an_error_that_occurred_while_it_was_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise OSError("too many open files")

    call = ("test.put", '{"path":"a"}')
    async with temporary_kernel(tmp_path, tools=[put], rules=["allow test.put"]) as kernel:
        turn = (await kernel.session()).start_turn()
        monkeypatch.setattr(LockResolver, "resolve", broken)
        turn.prepare_likely_call(call)
        answer = await turn.start_streamed_call(call)
    assert answer.result.error_kind == "backend" and "too many open files" in str(answer.result.error_text)
