"""Executable tools, as real processes in the real sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from handrail.contract.calls_and_results import Result
from handrail.contract.errors import ToolError
from handrail.registry.sources import executable_tools
from handrail.registry.sources.executable_tools import PerCallExecutableTool, parse_program_result
from handrail.registry.sources.tool_folder_source import ToolFolderSource
from handrail.sandbox import tier_probe
from handrail.sandbox.start.sandboxed_process import wait_until_sandboxes_dismantled

from .conftest import ExecutableFixture

confined = pytest.mark.skipif(
    not tier_probe.choose_sandbox().tier.is_confining, reason=f"no sandbox: {tier_probe.choose_sandbox().tier.detail}"
)
PYTHON = f"#!{sys.executable} -S\n"
ECHO = '#!/bin/sh\nread -r line\nprintf \'{"given": %s}\' "$line"\n'


def load_executable_tool(
    place: ExecutableFixture, script: str, name: str = "ext", **runtime: Any
) -> PerCallExecutableTool:
    place.put(name, script, **runtime)
    loaded = ToolFolderSource(place.tools, "global", place.confinement(), (str(place.workspace),)).load()
    assert loaded.faults == ()
    [found] = [found for found in loaded.tools if found.tool.spec.id == name]
    assert isinstance(found.tool, PerCallExecutableTool)
    return found.tool


async def call(place: ExecutableFixture, tool: PerCallExecutableTool, **arguments: Any) -> Any:
    return await tool.execute(arguments, place.runtime(tool.spec))


async def failure(place: ExecutableFixture, script: str, **runtime: Any) -> ToolError:
    with pytest.raises(ToolError) as caught:
        await call(place, load_executable_tool(place, script, **runtime))
    assert "Traceback" not in caught.value.text
    return caught.value


@confined
@pytest.mark.proves("R-02")
async def test_a_shell_script_tool_reads_json_and_returns_json(place: ExecutableFixture) -> None:
    tool = load_executable_tool(place, ECHO)
    assert await call(place, tool, text="ä\n'\"", n=[1, 2]) == {"given": {"text": "ä\n'\"", "n": [1, 2]}}


@confined
@pytest.mark.proves("R-02")
async def test_a_python_program_tool_reads_json_and_returns_json(place: ExecutableFixture) -> None:
    script = PYTHON + "import json, sys\na = json.load(sys.stdin)\nprint(json.dumps({'sum': sum(a['n'])}))\n"
    assert await call(place, load_executable_tool(place, script), n=[1, 2, 3]) == {"sum": 6}


@confined
@pytest.mark.proves("R-02", "K-08")
@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ({"type": "output", "data": [1]}, Result.output([1])),
        ({"type": "error", "error_text": "no", "metadata": {"error_kind": "conflict"}}, Result.error("conflict", "no")),
        ({"status": "success", "summary": "done"}, Result.output({"summary": "done"}, summary="done")),
        ({"status": "error", "summary": "no"}, Result.error("failed", "no")),
        ({"status": "fine", "summary": "x"}, {"status": "fine", "summary": "x"}),
    ],
)
async def test_a_program_may_answer_in_each_of_the_documented_shapes(
    place: ExecutableFixture, answer: Any, result: Any
) -> None:
    assert (
        await call(place, load_executable_tool(place, f"#!/bin/sh\ncat <<'END'\n{json.dumps(answer)}\nEND\n")) == result
    )


@confined
@pytest.mark.proves("R-02")
async def test_a_nonzero_exit_code_fails_the_call_with_the_end_of_stderr(place: ExecutableFixture) -> None:
    error = await failure(place, "#!/bin/sh\necho first >&2\necho 'no such branch' >&2\nexit 3\n")
    assert error.kind == "failed"
    assert "exit code 3" in error.text and "no such branch" in error.text and "first" not in error.text
    assert error.data == {"exit_code": 3, "stderr": "first\nno such branch"}


@confined
@pytest.mark.proves("R-02")
async def test_the_error_of_a_program_has_the_last_line_of_its_traceback(place: ExecutableFixture) -> None:
    error = await failure(place, PYTHON + "raise ValueError('the disk is blue')\n")
    assert "ValueError: the disk is blue" in error.text
    assert "Traceback" in error.data["stderr"]


@confined
async def test_an_error_envelope_becomes_the_result_at_any_exit_code(place: ExecutableFixture) -> None:
    script = '#!/bin/sh\necho \'{"type": "error", "error_text": "not today"}\'\nexit 1\n'
    assert await call(place, load_executable_tool(place, script)) == Result.error("failed", "not today")


@confined
async def test_the_output_of_a_failed_program_is_kept_in_the_error(place: ExecutableFixture) -> None:
    error = await failure(place, "#!/bin/sh\necho '{\"half\": 1}'\nexit 2\n")
    assert (error.kind, error.data) == ("failed", {"exit_code": 2, "answer": {"half": 1}})


@confined
@pytest.mark.proves("R-02")
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\n", "stdout is empty"),
        ("#!/bin/sh\necho done\n", "are not JSON"),
        ("#!/bin/sh\necho '[1]'\n", "are a JSON array"),
        ("#!/bin/sh\necho '{\"a\": NaN}'\n", "NaN"),
        ("#!/bin/sh\necho '{} {}'\n", "are not JSON"),
        ("#!/bin/sh\nprintf '\\377'\n", "not UTF-8"),
    ],
)
async def test_an_invalid_program_answer_gives_an_error_that_describes_the_protocol(
    place: ExecutableFixture, script: str, said: str
) -> None:
    error = await failure(place, script)
    assert error.kind == "backend"
    assert said in error.text and "one JSON object on stdout" in error.text


@confined
@pytest.mark.proves("R-02")
async def test_a_program_killed_by_a_signal_fails_with_the_signal_in_the_error(place: ExecutableFixture) -> None:
    error = await failure(place, "#!/bin/sh\nkill -9 $$\n")
    assert "signal 9" in error.text or "137" in error.text


@confined
@pytest.mark.proves("R-02")
async def test_output_above_the_limit_fails_with_a_limit_error(
    place: ExecutableFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executable_tools, "MAX_ANSWER_BYTES", 1_000)
    error = await failure(place, "#!/bin/sh\nhead -c 100000 /dev/zero\n")
    assert error.kind == "limit" and "limit is 1,000 bytes" in error.text


@confined
async def test_a_program_that_ignores_its_input_still_returns_a_result(place: ExecutableFixture) -> None:
    tool = load_executable_tool(place, "#!/bin/sh\nexec <&-\necho '{}'\n")
    assert await call(place, tool, text="x" * 1_000_000) == {}


@confined
async def test_a_missing_interpreter_is_reported_as_an_error(place: ExecutableFixture) -> None:
    error = await failure(place, "#!/no/such/interpreter\n")
    assert error.kind in ("failed", "backend")
    assert "ext" in error.text or "interpreter" in error.text or "127" in error.text


@confined
@pytest.mark.proves("R-02", "S-05")
async def test_a_lingering_child_process_neither_outlives_nor_delays_a_call(place: ExecutableFixture) -> None:
    script = "#!/bin/sh\n(trap '' TERM HUP; setsid sleep 1000; true) &\necho '{}'\n"
    tool = load_executable_tool(place, script)
    before = _children()
    assert await call(place, tool) == {}
    await wait_until_sandboxes_dismantled()
    assert _children() - before == set()


@confined
@pytest.mark.proves("R-02")
async def test_a_cancelled_call_ends_its_program(place: ExecutableFixture) -> None:
    tool = load_executable_tool(place, "#!/bin/sh\nprintf started\nexec sleep 1000\n")
    runtime = place.runtime(tool.spec)
    before = _children()
    running = asyncio.ensure_future(tool.execute({}, runtime))
    while runtime.partial_result is None:
        await asyncio.sleep(0)
    assert runtime.partial_result == {"stdout_tail": "started"}
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await wait_until_sandboxes_dismantled()
    assert _children() - before == set()


@confined
@pytest.mark.proves("R-02", "K-10")
async def test_a_program_sees_its_required_paths_and_reads_its_own_tool_folder(place: ExecutableFixture) -> None:
    (place.workspace / "a.txt").write_text("hello")
    (place.tools.parent / "secret").write_text("x")
    script = f"""#!/bin/sh
cd {place.tools} || exit 9
seen() {{ cat "$1" >/dev/null 2>&1 && echo true || echo false; }}
wrote() {{ (: > "$1") 2>/dev/null && echo true || echo false; }}
cat <<END
{{"read": $(seen {place.workspace}/a.txt), "write": $(wrote {place.workspace}/b.txt),
 "own": $(seen {place.tools}/reader), "change": $(wrote {place.tools}/reader),
 "beside": $(seen {place.tools.parent}/secret), "home": $(wrote "$HOME/x")}}
END
"""
    nothing = load_executable_tool(place, script, "reader", side_effect="read")
    assert await call(place, nothing) == {
        "read": False,
        "write": False,
        "own": True,
        "change": False,
        "beside": False,
        "home": True,
    }
    writing = {"fs": {"read": ["{workspace}"], "write": ["{workspace}"]}}
    declared = load_executable_tool(
        place, script.replace("reader", "writer"), "writer", side_effect="write", requires=writing
    )
    answer = await call(place, declared)
    assert (answer["read"], answer["write"]) == (True, True)
    only_reading = load_executable_tool(
        place, script.replace("reader", "looker"), "looker", side_effect="read", requires=writing
    )
    answer = await call(place, only_reading)
    assert (answer["read"], answer["write"]) == (True, False)


@confined
@pytest.mark.proves("R-02", "K-11a")
async def test_a_program_gets_the_call_variables_and_none_of_the_kernels_environment(
    place: ExecutableFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    script = PYTHON + "import json, os\nprint(json.dumps(dict(os.environ)))\n"
    environment = await call(place, load_executable_tool(place, script))
    assert "OPENAI_API_KEY" not in environment
    assert {name: value for name, value in environment.items() if name.startswith("HANDRAIL_")} == {
        "HANDRAIL_TOOL": "ext",
        "HANDRAIL_CALL_ID": "ses_1/1.0",
        "HANDRAIL_SESSION_ID": "ses_1",
        "HANDRAIL_AGENT": "default",
        "HANDRAIL_WORKSPACE": str(place.workspace),
    }


@confined
@pytest.mark.proves("K-03")
async def test_a_program_gets_the_default_values_of_its_settings(place: ExecutableFixture) -> None:
    script = PYTHON + "import json, os\nprint(os.environ['HANDRAIL_CONFIG'])\n"
    config: dict[str, Any] = {
        "region": {"description": "Where", "default": "eu"},
        "colour": {"description": "Which", "required": False},
    }
    assert await call(place, load_executable_tool(place, script, config=config)) == {"region": "eu"}


@confined
@pytest.mark.proves("R-02")
async def test_each_call_runs_in_a_separate_process_group(place: ExecutableFixture) -> None:
    script = PYTHON + "import json, os\nprint(json.dumps({'own': os.getpgrp() == os.getpgid(0) != 0}))\n"
    answers = await asyncio.gather(*(call(place, load_executable_tool(place, script)) for _ in range(3)))
    assert answers == [{"own": True}] * 3


def test_an_unnamed_signal_is_reported_by_its_number() -> None:
    with pytest.raises(ToolError, match="signal 99") as caught:
        parse_program_result(b"", b"", -99)
    assert caught.value.kind == "backend"


def test_undecodable_stderr_is_shown_as_far_as_possible() -> None:
    with pytest.raises(ToolError) as caught:
        parse_program_result(b"", b"\xff\xfe last", 1)
    assert caught.value.data["stderr"].endswith(" last")


def _children() -> set[int]:
    """The processes that descend from this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] != "Z":
                parents[int(entry.name)] = int(stat[1])
    found: set[int] = set()
    frontier = {os.getpid()}
    while frontier := {pid for pid, parent in parents.items() if parent in frontier} - found:
        found |= frontier
    return found
