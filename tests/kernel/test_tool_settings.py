"""The operator's settings for one tool reach it, and only it, in every lease holder."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.doors import HELD, JOINED, opened
from tests.upstream.scripted_mcp_servers import StdioServerProgram, approve_server_tools

from handrail import Kernel, LoadError, Runtime, Tool, ToolSpec, UsageError, open_kernel, tool
from handrail.contract.tool.spec import ConfigKey
from handrail.testing.scripted_kernel import temporary_kernel

UNITS = ConfigKey("metric or imperial", default="metric")
STATION = ConfigKey("The station's number")
TOKEN = ConfigKey("Of the account", secret=True, required=False)


@tool(id="weather.today", side_effect="read", locks=[], config={"units": UNITS, "station": STATION, "token": TOKEN})
async def weather(runtime: Runtime) -> dict[str, str]:
    """The weather of today."""
    return dict(runtime.config)


class Wind(Tool):
    spec = ToolSpec(
        id="weather.wind", description="The wind of today.", side_effect="read", locks=(), config={"units": UNITS}
    )

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        return dict(runtime.config)


TOOLS = (weather, Wind())
BOTH = pytest.mark.parametrize("door", [HELD, JOINED])


def put_programs(folder: Path) -> None:
    """An executable, one that stays up, and a module, each of which answers with its settings."""
    folder.mkdir(parents=True, exist_ok=True)
    once = "#!/usr/bin/env python3\nimport json, os\nprint(json.dumps({'said': json.loads(os.environ['HANDRAIL_CONFIG'])}))\n"
    stays = (
        "#!/usr/bin/env python3\nimport json, os, sys\nsaid = json.loads(os.environ['HANDRAIL_CONFIG'])\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'id': json.loads(line)['id'], 'result': {'said': said}}), flush=True)\n"
    )
    for name, script, more in (("once", once, {}), ("stays", stays, {"persistent": True})):
        llm: dict[str, Any] = {
            "name": name,
            "description": "Says its settings.",
            "parameters": {"type": "object", "properties": {}},
        }
        config = {"region": {"description": "Where", "default": "eu"}}
        view: dict[str, Any] = {"side_effect": "read", "locks": [], "config": config, **more}
        (folder / f"{name}.json").write_text(json.dumps({"llm": llm, "runtime": view}))
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    (folder / "module.py").write_text(
        '"""Says its settings."""\n'
        'METADATA = {"description": "Says its settings.", "side_effect": "read", "locks": [],\n'
        '                 "config_schema": {"region": {"description": "Where", "default": "eu"}},\n'
        '                 "parameters": {}}\n\n\n'
        "def execute(topic, params, config=None, telemetry=None):\n"
        '    return {"text": config["region"]}\n'
    )


async def read_tool_data(kernel: Kernel, tool_id: str) -> Any:
    result = await (await kernel.session()).call(tool_id, {})
    assert result.ok, result
    return result.data


@pytest.mark.proves("K-03", "K-11e")
@BOTH
async def test_a_tool_reads_the_values_that_the_configuration_and_the_program_set(tmp_path: Path, door: str) -> None:
    settings = '[tools."weather.today".config]\nunits = "imperial"\nstation = "7"\n'
    given = {"weather.today": {"station": "12"}, "weather.wind": {"units": "knots"}}
    how: dict[str, Any] = {"tools": TOOLS, "rules": ["allow weather.*"], "settings": settings}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    async with opened(door, tmp_path / "a", **how) as kernel:
        assert await read_tool_data(kernel, "weather.today") == {"units": "imperial", "station": "7"}
        assert await read_tool_data(kernel, "weather.wind") == {"units": "metric"}
    async with opened(door, tmp_path / "b", **how, tool_config=given) as kernel:
        assert await read_tool_data(kernel, "weather.today") == {"units": "imperial", "station": "12"}
        assert await read_tool_data(kernel, "weather.wind") == {"units": "knots"}


@pytest.mark.proves("K-03", "R-02", "K-11e")
@BOTH
async def test_programs_and_modules_of_tool_folders_receive_their_configured_values(tmp_path: Path, door: str) -> None:
    put_programs(tmp_path / "config" / "tools")
    settings = '[tools.once.config]\nregion = "us"\n[tools.stays.config]\nregion = "us"\n'
    given = {"stays": {"region": "asia"}, "module": {"region": "asia"}}
    rules = ["allow once", "allow stays", "allow module"]
    async with opened(door, tmp_path, rules=rules, settings=settings, tool_config=given) as kernel:
        assert await read_tool_data(kernel, "once") == {"said": {"region": "us"}}
        assert await read_tool_data(kernel, "stays") == {"said": {"region": "asia"}}
        assert (await read_tool_data(kernel, "module"))["text"] == "asia"


@pytest.mark.proves("K-13", "K-11e")
async def test_an_agents_manifest_sets_values_for_its_own_sessions(tmp_path: Path) -> None:
    folder = tmp_path / "config" / "agents" / "abroad"
    folder.mkdir(parents=True)
    manifest = folder / "agent.toml"
    manifest.write_text('id = "abroad"\n[tool_config."weather.wind"]\nunits = "knots"\n')
    settings = '[tools."weather.wind".config]\nunits = "imperial"\n'
    how: dict[str, Any] = {"tools": TOOLS, "rules": ["allow weather.*"], "settings": settings}
    async with temporary_kernel(tmp_path, **how) as kernel:
        assert await read_tool_data(kernel, "weather.wind") == {"units": "imperial"}
        session = await kernel.session(agent="abroad")
        assert (await session.call("weather.wind", {})).data == {"units": "knots"}
    async with opened(HELD, tmp_path, **how, tool_config={"weather.wind": {"units": "metres"}}) as kernel:
        session = await kernel.session(agent="abroad")
        assert (await session.call("weather.wind", {})).data == {"units": "metres"}, "a program's come first"
        manifest.write_text('id = "abroad"\n[tool_config."weather.wnd"]\nunits = "knots"\n')
    async with temporary_kernel(tmp_path, **how) as kernel:
        with pytest.raises(
            LoadError, match=r"tool_config\['weather.wnd'\]: tool 'weather.wnd' does not exist; did you mean"
        ):
            await kernel.session(agent="abroad")


@pytest.mark.proves("K-03", "R-11")
@BOTH
async def test_a_tool_without_a_required_value_is_unavailable_and_the_reason_shows_the_fix(
    tmp_path: Path, door: str
) -> None:
    async with opened(door, tmp_path, tools=TOOLS, rules=["allow weather.*"]) as kernel:
        entry = kernel.generation.entries["weather.today"]
        assert entry.status == "available" and entry.unavailable_reason is not None
        assert (
            'station (The station\'s number; add station = "…" under [tools."weather.today".config]'
            in entry.unavailable_reason
        )
        assert "open_kernel(tool_config=…)" in entry.unavailable_reason
        assert (await (await kernel.session()).call("weather.today", {})).error_kind == "unavailable"
        assert await read_tool_data(kernel, "weather.wind") == {"units": "metric"}


@pytest.mark.proves("K-03")
@pytest.mark.parametrize(
    ("line", "where", "problem"),
    [
        ('unit = "metric"', "unit", "unknown key; did you mean 'units'?"),
        ('token = "hunter2-of-the-test"', "token", 'token = { secret = "NAME" }'),
        ('units = { secret = "TOKEN" }', "units", "is not a secret setting"),
        ("units = 5", "units", "is not text"),
        ("units = true", "units", "is not text"),
        ('units = ["a"]', "units", "neither text nor a reference to a secret"),
    ],
)
async def test_an_invalid_tool_value_stops_the_start_and_the_error_names_its_line(
    tmp_path: Path, line: str, where: str, problem: str
) -> None:
    settings = f'[tools."weather.today".config]\nstation = "7"\n{line}\n'
    with pytest.raises(LoadError) as refused:
        async with temporary_kernel(tmp_path, tools=TOOLS, settings=settings):
            pass
    (fault,) = refused.value.diagnostics
    assert fault.source == f"{tmp_path}/config/handrail.toml:3" and fault.location.endswith(f".config.{where}")
    assert problem in fault.problem and "hunter2" not in str(refused.value)


@pytest.mark.proves("K-03")
@BOTH
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"weather.today": {"unit": "metric"}},
            r"tool_config\['weather.today'\]\.unit: unknown key; did you mean 'units'",
        ),
        ({"weather.tody": {"units": "metric"}}, r"tool 'weather.tody' does not exist; did you mean 'weather.today'"),
        (
            {"weather.today": {"token": "hunter2-of-the-test"}},
            r"is a secret setting, so its value cannot be written here",
        ),
        ({"read": {"units": "metric"}}, r"the tool declares no settings"),
        ({"weather.wind": {"units": "m" * 70_000}}, r"have 70,013 bytes together; the maximum for a program is 65,536"),
    ],
)
async def test_tool_config_values_are_validated_against_the_loaded_tools(
    tmp_path: Path, door: str, given: Mapping[str, Mapping[str, str]], problem: str
) -> None:
    with pytest.raises(LoadError, match=problem) as refused:
        async with opened(door, tmp_path, tools=TOOLS, tool_config=given):
            pass
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {"weather.today": {"units": 5}},
        {"weather.today": "metric"},
        ["units"],
        {5: {}},
        {"weather.wind": {"units": "\ud800"}},
    ],
)
async def test_malformed_tool_config_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(UsageError, match=r"Expected \{\"TOOL ID\""):
        async with open_kernel(tmp_path, tools=TOOLS, tool_config=given, state=tmp_path / "state"):
            pass


@pytest.mark.proves("F-11")
async def test_a_workspace_file_cannot_configure_a_tool(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    for text in ('[tools."weather.wind".config]\nunits = "knots"\n', "[tools.read]\nmax_output = 2000\n"):
        (tmp_path / "ws" / "handrail.toml").write_text(text)
        with pytest.raises(LoadError, match="cannot set up tools"):
            async with temporary_kernel(tmp_path, tools=TOOLS):
                pass


@pytest.mark.proves("R-04", "K-03")
async def test_an_overriding_tool_of_an_agent_checks_the_values_for_its_id(tmp_path: Path) -> None:
    put_programs(tmp_path / "config" / "tools")
    own = tmp_path / "config" / "agents" / "abroad"
    put_programs(own / "tools")
    (own / "agent.toml").write_text('id = "abroad"\n[tool_config.once]\nplace = "us"\n')
    manifest = json.loads((own / "tools" / "once.json").read_text())
    manifest["runtime"]["config"] = {"place": {"description": "Where", "default": "eu"}}
    (own / "tools" / "once.json").write_text(json.dumps(manifest))
    async with temporary_kernel(tmp_path, rules=["allow once"]) as kernel:
        for _ in range(2):  # the second look finds what the first has judged
            session = await kernel.session(agent="abroad")
            assert (await session.call("once", {})).data == {"said": {"place": "us"}}
            await kernel.reload_tools()
        assert await read_tool_data(kernel, "once") == {"said": {"region": "eu"}}


@pytest.mark.proves("K-11e")
async def test_a_connected_process_configures_values_for_its_own_tools_but_no_limits(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text('[tools."weather.wind"]\ntimeout_ms = 900\n[tools."weather.wind".config]\nunits = "knots"\n')
    state, rules = tmp_path / "state", ["allow weather.*"]
    async with (
        temporary_kernel(tmp_path, tools=TOOLS, rules=rules) as holder,
        open_kernel(tmp_path / "ws", tools=TOOLS, rules=rules, state=state, config=other) as joined,
    ):
        assert await read_tool_data(joined, "weather.wind") == {"units": "knots"}
        assert joined.generation.entries["weather.wind"].spec.timeout_ms == 60_000
        assert await read_tool_data(holder, "weather.wind") == {"units": "metric"}


@pytest.mark.proves("K-11e", "L-07")
async def test_a_connected_process_configures_tools_and_watchdogs_for_its_own_sessions_only(tmp_path: Path) -> None:
    watchdog = tmp_path / "watchdog"
    watchdog.write_text('#!/bin/sh\necho \'{"decision": "deny", "reason": "not today"}\'\n')
    watchdog.chmod(0o755)
    state, config, rules = tmp_path / "state", tmp_path / "config" / "handrail.toml", ["allow weather.*", "allow read"]
    options: Any = {"tools": TOOLS, "rules": rules, "state": state, "config": config}
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=rules) as holder:
        given = ['tools."weather.wind".config.units=knots', "tools.read.max_output=2000", "catalog.preload=3"]
        async with open_kernel(tmp_path / "ws", settings=given, **options) as joined:
            assert await read_tool_data(joined, "weather.wind") == {"units": "knots"}
            assert joined.generation.entries["read"].spec.max_output == 2_000
            assert await read_tool_data(holder, "weather.wind") == {"units": "metric"}
            assert holder.generation.entries["read"].spec.max_output != 2_000
        given = [f'watchdogs=[{{command = ["{watchdog}"]}}]']
        async with open_kernel(tmp_path / "ws", settings=given, **options) as joined:
            refused = await (await joined.session()).call("weather.wind", {})
            assert refused.error_kind == "denied" and "not today" in str(refused.error_text), refused
            assert (await (await holder.session()).call("weather.wind", {})).ok
        for one in (
            'watchdogs=[{use = "secrets", action = "off"}]',
            "limits.grace_ms=1",
            'tools."weather.today".config.token={secret = "T"}',
        ):
            with pytest.raises(UsageError, match="Cannot set "):
                async with open_kernel(tmp_path / "ws", settings=[one], **options):
                    pass


@pytest.mark.proves("K-11e", "L-07")
async def test_a_secret_setting_for_a_tool_of_a_connected_process_comes_from_that_process(tmp_path: Path) -> None:
    @tool(id="account.look", side_effect="read", locks=[], config={"token": ConfigKey("Of the account", secret=True)})
    async def look(runtime: Runtime) -> list[str]:
        """Look at the account."""
        token = runtime.secrets.get("token")
        return [token[:3], token]

    (tmp_path / "token").write_text("hunter2-of-the-test")
    (tmp_path / "token").chmod(0o600)
    own, without = tmp_path / "own.toml", tmp_path / "without.toml"
    own.write_text(
        f'[secrets]\nT = {{ file = "{tmp_path / "token"}" }}\n[tools."account.look".config]\ntoken = {{ secret = "T" }}\n'
    )
    without.touch()
    options: Any = {"tools": [look], "rules": ["allow account.look"], "state": tmp_path / "state"}
    async with temporary_kernel(tmp_path):
        async with open_kernel(tmp_path / "ws", config=own, **options) as joined:
            result = await (await joined.session()).call("account.look", {})
            assert result.ok and result.data[0] == "hun" and "hunter2" not in result.data[1], result
        async with open_kernel(tmp_path / "ws", config=without, **options) as joined:
            withheld = await (await joined.session()).call("account.look", {})
            assert withheld.error_kind == "unavailable" and "has not set it" in str(withheld.error_text), withheld


# ── limits ───────────────────────────────────────────────────────────────────────────────────────


@tool(id="long.text", side_effect="read", locks=[])
def long_text() -> str:
    """A long text."""
    return "x" * 50_000


@tool(id="long.limit", side_effect="read", locks=[], max_output=9_000)
def long_limit(runtime: Runtime) -> int:
    """Say the limit on its output."""
    return runtime.max_output_bytes


@tool(id="long.list", side_effect="read", locks=[])
def long_list() -> list[int]:
    """A long list."""
    return list(range(500))


@tool(id="long.wait", side_effect="read", locks=[])
async def long_wait(runtime: Runtime) -> None:
    """Wait until it is stopped."""
    await asyncio.Event().wait()


LONG = (long_text, long_limit, long_list, long_wait)
LIMITS = """
[tools."long.text"]
max_output = 2000
[tools."long.limit"]
max_output = 3000
[tools."long.list"]
max_entries = 7
[tools."long.wait"]
timeout_ms = 100
[tools.read]
max_output = 4096
[tools.glob]
max_entries = 3
[tools.bash]
max_output = 2000
timeout_ms = 300
"""


@pytest.mark.proves("O-01")
@BOTH
async def test_the_operator_sets_the_limits_and_timeout_of_each_tool(tmp_path: Path, door: str) -> None:
    async with opened(door, tmp_path, tools=LONG, rules=["allow *"], settings=LIMITS) as kernel:
        (tmp_path / "ws" / "long.txt").write_text("".join(f"line {number}\n" for number in range(5_000)))
        for number in range(9):
            (tmp_path / "ws" / f"{number}.md").touch()
        session = await kernel.session()
        text = await session.call("long.text", {})
        assert text.metadata["truncated"] is True and len(json.dumps(text.data)) < 2_100
        assert (await session.call("long.limit", {})).data == 3_000
        assert (await session.call("long.list", {})).data["head"] == list(range(7))
        stopped = await session.call("long.wait", {})
        assert stopped.error_kind == "timeout" and "timed out after 100 ms" in (stopped.error_text or "")
        assert len((await session.call("glob", {"pattern": "*.md"})).data["head"]) == 3
        read = await session.call("read", {"path": "long.txt"})
        assert "truncated" not in read.metadata and 2_000 < len(json.dumps(read.data)) <= 4_096
        assert read.data["next"] == read.data["last_line"] + 1
        more = await session.call("read", {"path": "long.txt", "offset": read.data["next"]})
        assert more.data["text"].startswith(f"line {read.data['last_line']}\n")
        ranged = await session.call("read", {"path": "long.txt", "unit": "bytes"})
        assert "truncated" not in ranged.metadata and ranged.data["next"] <= 4_096


@pytest.mark.proves("O-01")
async def test_the_operators_limits_also_apply_to_the_shell_tool(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, rules=["allow bash"], settings=LIMITS) as kernel:
        session = await kernel.session()
        cut = await session.call("bash", {"command": "seq 1 3000"})
        assert cut.metadata["truncated"] is True and len(cut.data["head"]) <= 2_000
        stopped = await session.call("bash", {"command": "tail -f /dev/null", "timeout_ms": 600_000})
        assert stopped.error_kind == "timeout" and "timed out after 300 ms" in (stopped.error_text or "")


@pytest.mark.proves("O-01", "O-02")
async def test_the_operators_limits_also_apply_to_a_third_party_tool(tmp_path: Path) -> None:
    settings = StdioServerProgram(tmp_path).settings_toml("t") + '[tools."t_echo"]\nmax_output = 1024\n'
    async with temporary_kernel(tmp_path, rules=["allow mcp:t:*"], settings=settings) as kernel:
        await approve_server_tools(kernel, "t")
        result = await (await kernel.session()).call("t_echo", {"text": "x" * 9_000})
        assert result.metadata["truncated"] is True and len(json.dumps(result.data)) < 1_200


async def test_a_program_sets_tool_limits_through_settings(tmp_path: Path) -> None:
    settings = ['tools."long.text".max_output=2000', "tools.long.text.max_output=3"]
    state = tmp_path / "state"
    config = tmp_path / "handrail.toml"
    config.write_text("[tools.glob]\nenabled = false\n")
    (tmp_path / "ws").mkdir()
    how: dict[str, Any] = {"tools": LONG, "rules": ["allow long.*"], "state": state, "config": config}
    async with open_kernel(tmp_path / "ws", settings=settings[:1], **how) as kernel:
        text = await (await kernel.session()).call("long.text", {})
        assert text.metadata["truncated"] is True
        assert kernel.generation.entries["glob"].status == "disabled", "the file's settings of other tools stay"
    with pytest.raises(LoadError, match="in quotes"):
        async with open_kernel(tmp_path / "ws", settings=settings[1:], **how):
            pass


@pytest.mark.proves("O-01")
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("max_output = 10", "greater than or equal to 1024"),
        ("max_output = 99999999999", "less than or equal to 16777216"),
        ('max_output = "64 KB"', "valid integer"),
        ("max_entries = 0", "greater than or equal to 1"),
        ("timeout_ms = 1", "greater than or equal to 100"),
        ("timeout_ms = 99999999999", "less than or equal to 604800000"),
        ("time_out_ms = 1000", "unknown key; did you mean 'timeout_ms'?"),
    ],
)
async def test_a_limit_out_of_bounds_stops_the_start_and_the_error_names_its_line(
    tmp_path: Path, line: str, problem: str
) -> None:
    with pytest.raises(LoadError) as refused:
        async with temporary_kernel(tmp_path, settings=f"[tools.glob]\n{line}\n"):
            pass
    (fault,) = refused.value.diagnostics
    assert fault.source == f"{tmp_path}/config/handrail.toml:2" and problem in fault.problem


async def test_operator_settings_do_not_change_the_definition_hash_of_a_tool(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path / "a", tools=TOOLS) as kernel:
        before = kernel.generation.entries["weather.wind"]
    settings = '[tools."weather.wind"]\ntimeout_ms = 5000\n[tools."weather.wind".config]\nunits = "knots"\n'
    async with temporary_kernel(tmp_path / "b", tools=TOOLS, settings=settings) as kernel:
        after = kernel.generation.entries["weather.wind"]
        assert (
            after.definition_hash == before.definition_hash
            and after.spec.build_llm_view() == before.spec.build_llm_view()
        )
        assert not await kernel.reload_tools()
        assert kernel.generation.entries["weather.wind"] is after, "nothing is judged again"
