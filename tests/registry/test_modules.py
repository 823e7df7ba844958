"""Python modules as tools: read without running, run in a worker, with their result format."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from handrail.contract.calls_and_results import Blob, Result
from handrail.contract.errors import ToolError
from handrail.contract.result_conversions import convert_card_to_result, convert_result_to_card
from handrail.registry.sources.tool_folder_source import PerCallModuleTool, ToolFolderSource
from handrail.sandbox import tier_probe

from .conftest import ExecutableFixture

confined = pytest.mark.skipif(
    not tier_probe.choose_sandbox().tier.is_confining, reason=f"no sandbox: {tier_probe.choose_sandbox().tier.detail}"
)
WEATHER = """
METADATA = {
    "description": "The weather at a place.",
    "parameters": {"city": {"type": "string", "description": "Where", "required": True}, "days": {"type": "integer"}},
    "constraints": {"timeout_seconds": 9},
    "side_effect": "read",
    "config_schema": {"unit": {"description": "C or F", "default": "C"}},
}

def execute(topic: str, params: dict, config: dict = None, telemetry: dict = None) -> dict:
    print("for whoever looks")
    return {"text": f"{params['city']}: 20 {config['unit']}", "topic": topic, "telemetry": telemetry}
"""


def put(place: ExecutableFixture, source: str, name: str = "weather", mode: int = 0o644) -> None:
    path = place.tools / f"{name}.py"
    path.write_text(textwrap.dedent(source))
    path.chmod(mode)


def loaded(place: ExecutableFixture) -> Any:
    return ToolFolderSource(place.tools, "global", place.confinement(), (str(place.workspace),)).load()


def load_module_tool(place: ExecutableFixture, source: str) -> PerCallModuleTool:
    put(place, source)
    found = loaded(place)
    assert found.faults == ()
    tool = found.tools[0].tool
    assert isinstance(tool, PerCallModuleTool)
    return tool


def problems(place: ExecutableFixture, source: str) -> str:
    put(place, source)
    found = loaded(place)
    assert found.tools == ()
    return " | ".join(f"{fault.location}: {fault.problem}" for fault in found.faults)


@pytest.mark.proves("R-08")
def test_a_modules_metadata_becomes_a_tool_without_running_the_module(place: ExecutableFixture) -> None:
    tool = load_module_tool(place, f"raise SystemExit('it ran')\n{WEATHER}")
    assert tool.spec.id == "weather"
    assert tool.spec.parameters == {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Where"}, "days": {"type": "integer"}},
        "required": ["city"],
    }
    assert (tool.spec.timeout_ms, tool.spec.side_effect) == (9_000, "read")
    assert tool.spec.config["unit"].default == "C"
    assert not tool.trusted


@confined
@pytest.mark.proves("R-08")
async def test_a_module_gets_topic_params_config_and_telemetry_with_null_fields(place: ExecutableFixture) -> None:
    tool = load_module_tool(place, WEATHER)
    result = await tool.execute({"city": "Bern"}, place.runtime(tool.spec))
    assert isinstance(result, Result) and result.data == {
        "text": "Bern: 20 C",
        "topic": "",
        "telemetry": {"time": None, "location": None, "locale": None, "device": None},
    }


@confined
@pytest.mark.proves("R-08", "K-08")
async def test_an_error_in_a_module_answer_replaces_the_rest_of_the_answer(place: ExecutableFixture) -> None:
    source = """
    METADATA = {"description": "d", "side_effect": "read"}
    def execute(topic, params):
        return {"text": "half of it", "html": "<b>half</b>", "error": "the service is down"}
    """
    tool = load_module_tool(place, source)
    assert await tool.execute({}, place.runtime(tool.spec)) == Result.error("failed", "the service is down")


@confined
@pytest.mark.proves("R-08", "K-08")
async def test_html_in_a_module_answer_becomes_a_separate_blob(place: ExecutableFixture) -> None:
    source = """
    METADATA = {"description": "d", "side_effect": "read"}
    async def execute(topic, params, **more):
        return {"text": "ok", "html": "<b>ok</b>", "n": sorted(more)}
    """
    tool = load_module_tool(place, source)
    result = await tool.execute({}, place.runtime(tool.spec))
    assert isinstance(result, Result)
    assert result.data == {"text": "ok", "html": Blob(b"<b>ok</b>", "text/html"), "n": ["config", "telemetry"]}


@confined
@pytest.mark.proves("R-08")
async def test_an_exception_in_a_module_becomes_an_error_with_its_type_and_text(place: ExecutableFixture) -> None:
    source = """
    METADATA = {"description": "d", "side_effect": "read"}
    def execute(topic, params):
        raise KeyError("city")
    """
    tool = load_module_tool(place, source)
    assert await tool.execute({}, place.runtime(tool.spec)) == Result.error("failed", "KeyError: 'city'")


@confined
@pytest.mark.proves("R-08", "R-03")
async def test_a_persistent_module_is_imported_once(place: ExecutableFixture) -> None:
    source = """
    METADATA = {"description": "d", "side_effect": "read", "persistent": True}
    calls = []
    def execute(topic, params):
        calls.append(1)
        if params.get("break"):
            raise ValueError("broken")
        return {"text": str(len(calls))}
    """
    tool = load_module_tool(place, source)
    try:
        runtime = place.runtime(tool.spec)
        assert await tool.execute({}, runtime) == Result.output({"text": "1"})
        assert await tool.execute({"break": 1}, runtime) == Result.error("failed", "ValueError: broken")
        assert await tool.execute({}, runtime) == Result.output({"text": "3"})
    finally:
        await tool.aclose()


@confined
@pytest.mark.proves("R-08")
async def test_a_module_is_confined_to_its_requirements(place: ExecutableFixture) -> None:
    outside = place.workspace.parent / "outside.txt"
    outside.write_text("not for it")
    source = f"""
    METADATA = {{"description": "d", "side_effect": "write"}}
    import os, socket
    def execute(topic, params):
        seen = os.path.exists({str(outside)!r})
        try:
            socket.create_connection(("127.0.0.1", 9), 1)
        except OSError as error:
            return {{"text": f"{{seen}} {{type(error).__name__}}"}}
    """
    tool = load_module_tool(place, source)
    result = await tool.execute({}, place.runtime(tool.spec))
    assert isinstance(result, Result) and result.data["text"] in (
        "False ConnectionRefusedError",
        "False OSError",
        "False PermissionError",
    )


@confined
@pytest.mark.proves("R-08")
async def test_a_module_that_returns_no_dict_gives_an_error_naming_the_expected_form(place: ExecutableFixture) -> None:
    tool = load_module_tool(place, 'METADATA = {"description": "d"}\ndef execute(topic, params):\n    return "text"\n')
    result = await tool.execute({}, place.runtime(tool.spec))
    assert isinstance(result, Result) and "expected a dict with text, html or error" in str(result.error_text)


@confined
async def test_a_module_that_cannot_be_imported_fails_with_the_reason(place: ExecutableFixture) -> None:
    tool = load_module_tool(
        place, 'METADATA = {"description": "d"}\nimport no_such_package\ndef execute(topic, params): ...\n'
    )
    with pytest.raises(ToolError, match="No module named 'no_such_package'") as caught:
        await tool.execute({}, place.runtime(tool.spec))
    assert "Traceback" not in str(caught.value.data)


@confined
async def test_a_module_with_a_manifest_file_loads_as_one_tool(place: ExecutableFixture) -> None:
    place.put("hello", None, side_effect="read")
    put(place, "METADATA = {'description': ''}\ndef execute(topic, params):\n    return {'text': 'hi'}\n", "hello")
    found = loaded(place)
    assert found.faults == () and len(found.tools) == 1
    tool = found.tools[0].tool
    assert await tool.execute({}, place.runtime(tool.spec)) == Result.output({"text": "hi"})


def test_a_module_without_metadata_is_not_loaded_as_a_tool(place: ExecutableFixture) -> None:
    put(place, "def execute(topic, params): ...", "shared")
    assert (loaded(place).tools, loaded(place).faults) == ((), ())


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("METADATA = {'description': 'd'}\n", "execute: is missing; expected def execute(topic, params"),
        ("METADATA = {'description': 'd'}\ndef execute(topic): ...\n", "execute: takes topic; expected"),
        (
            "METADATA = {'description': 'd'}\ndef execute(topic, params, key): ...\n",
            "requires key, which the worker does not pass",
        ),
        ("METADATA = {'description': open('x')}\ndef execute(topic, params): ...\n", "METADATA: is not a literal"),
        ("METADATA = [1]\ndef execute(topic, params): ...\n", "METADATA: is a list; expected a dict"),
        ("METADATA = {}\ndef execute(topic, params): ...\n", "llm.description"),
        ("METADATA = {'description': 'd', 'timeout': 1}\ndef execute(t, p): ...\n", "runtime.timeout"),
        (
            "METADATA = {'description': 'd', 'constraints': {'cost': 1}}\ndef execute(t, p): ...\n",
            "runtime.constraints",
        ),
        (
            "METADATA = {'description': 'd', 'parameters': {'a': {'type': 'str'}}}\ndef execute(t, p): ...\n",
            "parameters",
        ),
        ("METADATA = {\n", "is not Python"),
        ("METADATA = " + "[" * 5000, "Python"),
    ],
)
@pytest.mark.proves("R-08")
def test_every_fault_of_a_module_is_named(place: ExecutableFixture, source: str, problem: str) -> None:
    assert problem in problems(place, source)


def test_a_module_that_other_users_can_write_is_refused(place: ExecutableFixture) -> None:
    put(place, WEATHER, mode=0o666)
    assert "is writable by its group or by others" in loaded(place).faults[0].problem


@pytest.mark.proves("K-08")
def test_a_result_converts_to_a_card_and_a_card_to_a_result() -> None:
    assert convert_result_to_card(Result.output({"text": "a", "title": "t"})) == {"text": "a", "title": "t"}
    assert convert_result_to_card(Result.output([1])) == {"text": "[1]"}
    assert convert_result_to_card(Result.error("failed", "no")) == {"error": "no"}
    assert convert_card_to_result({"error": "", "text": "fine"}) == Result.output({"text": "fine"})
    assert json.dumps(convert_result_to_card(convert_card_to_result({"error": 7})))


@confined
def test_a_module_runs_when_the_python_of_handrail_is_reached_through_a_link(
    place: ExecutableFixture, tmp_path: Path
) -> None:
    put(
        place,
        "METADATA = {'description': 'Says yes.', 'side_effect': 'read', 'locks': []}\ndef execute(topic, params):\n    return {'text': 'yes'}\n",
        "yes",
    )
    (place.tools.parent / "handrail.toml").touch()
    (tmp_path / "current").symlink_to(sys.prefix, target_is_directory=True)
    script = f"""
    import asyncio
    from handrail import open_kernel

    async def main():
        config = {str(place.tools.parent / "handrail.toml")!r}
        async with open_kernel({str(place.workspace)!r}, config=config, state={str(tmp_path / "state")!r}, rules=["allow yes"]) as kernel:
            result = await (await kernel.session(headless=True)).call("yes", {{}})
            print(result.data, result.error_text)

    asyncio.run(main())
    """
    python = tmp_path / "current" / "bin" / Path(sys.executable).name
    done = subprocess.run([python, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert "'text': 'yes'" in done.stdout, done
