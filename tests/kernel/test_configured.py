"""The operator's settings take effect in the whole kernel, and unusable tools are withheld with a reason."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from handrail import Event, LoadError, UsageError, open_kernel, tool
from handrail.kernel.doctor import check_kernel
from handrail.kernel.kernel_assembly import MAX_RULES
from handrail.testing.scripted_kernel import temporary_kernel

WATCHDOG = """\
import json, sys
call = json.load(sys.stdin)
bad = "forbidden" in json.dumps(call["arguments"])
print(json.dumps({"decision": "deny", "reason": "a forbidden word"} if bad else {"decision": "allow"}))
"""


@tool(id="mail.send", side_effect="external", locks=["outbox:X"])
async def send(to: str) -> str:
    """Send a mail."""
    return to


def put_tool(folder: Path, name: str, **runtime: Any) -> None:
    """A tool that answers with its own name."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    llm = {"name": name, "description": "Says its name.", "parameters": parameters}
    view: dict[str, Any] = {"side_effect": "read", "locks": [], **runtime}
    (folder / f"{name}.json").write_text(json.dumps({"llm": llm, "runtime": view}))
    (folder / name).write_text(f'#!/bin/sh\necho \'{{"tool": "{name}"}}\'\n')
    (folder / name).chmod(0o755)


@pytest.mark.proves("P-11")
async def test_a_configured_watchdog_checks_every_call(tmp_path: Path) -> None:
    (tmp_path / "watchdog.py").write_text(WATCHDOG)
    command = json.dumps([sys.executable, str(tmp_path / "watchdog.py")])
    settings = f"[[watchdogs]]\ncommand = {command}\ntimeout_ms = 60000\n"
    async with temporary_kernel(tmp_path, tools=[send], rules=["allow mail.send"], settings=settings) as kernel:
        session = await kernel.session()
        assert (await session.call("mail.send", {"to": "ann"})).data == "ann"
        refused = await session.call("mail.send", {"to": "a forbidden person"})
        assert refused.error_kind == "denied"
        assert refused.error_text is not None and "a forbidden word" in refused.error_text
        assert (await session.call("read", {"path": "forbidden"})).error_kind == "denied"


@pytest.mark.proves("P-03")
async def test_configuration_rules_have_project_scope_and_program_rules_have_session_scope(tmp_path: Path) -> None:
    settings = 'rules = ["allow mail.send", "deny mail.send to=eve"]\n'
    async with temporary_kernel(tmp_path, tools=[send], rules=["allow mail.send to=eve"], settings=settings) as kernel:
        session = await kernel.session(rules=["deny mail.send to=bob"])
        allowed = [name for name in ("ann", "bob", "eve") if (await session.call("mail.send", {"to": name})).ok]
        assert allowed == ["ann"]  # of equally specific rules the stricter holds, whatever its scope
        assert {rule.scope for rule in session.rules.rules} == {"default", "project", "session"}


@pytest.mark.proves("K-10")
async def test_the_configured_ceiling_bounds_the_read_tool(tmp_path: Path) -> None:
    settings = '[ceiling.fs]\nread = ["{workspace}/open"]\n'
    async with temporary_kernel(tmp_path, settings=settings, rules=["allow *"]) as kernel:
        for name in ("open", "closed"):
            (tmp_path / "ws" / name).mkdir()
            (tmp_path / "ws" / name / "a.txt").write_text(name)
        session = await kernel.session()
        assert (await session.call("read", {"path": "open/a.txt"})).ok
        beyond = await session.call("read", {"path": "closed/a.txt"})
        assert beyond.error_kind == "denied" and beyond.error_text is not None and "ceiling" in beyond.error_text


@pytest.mark.proves("R-01", "R-04")
async def test_global_and_agent_tool_folders_are_loaded_and_the_agents_tool_takes_precedence(
    tmp_path: Path,
) -> None:
    put_tool(tmp_path / "config" / "tools", "here")
    put_tool(tmp_path / "config" / "tools", "both", version="global")
    put_tool(tmp_path / "config" / "agents" / "default" / "tools", "both", version="agent")
    put_tool(tmp_path / "config" / "agents" / "another" / "tools", "elsewhere")
    async with temporary_kernel(tmp_path, tools=[send]) as kernel:
        ids = [tool_id for tool_id, entry in kernel.generation.entries.items() if entry.source != "built-in"]
        assert ids[-3:] == ["both", "here", "mail.send"]
        assert kernel.generation.entries["both"].spec.version == "agent"


@pytest.mark.proves("R-01", "S-08")
async def test_a_tool_with_missing_secrets_is_withheld_and_its_calls_name_them(
    tmp_path: Path,
) -> None:
    tools = tmp_path / "config" / "tools"
    put_tool(tools, "weather", requires={"net": {"hosts": ["api.example.org"]}}, secrets=["WEATHER_KEY"])
    put_tool(tools, "billing", secrets=["BILLING_KEY"])
    async with temporary_kernel(tmp_path, rules=["allow *"], secrets={"OTHER_KEY": "0123456789"}) as kernel:
        session = await kernel.session()
        for name, word in (("weather", "WEATHER_KEY"), ("billing", "BILLING_KEY")):
            answer = await session.call(name, {})
            assert answer.error_kind == "unavailable"
            assert answer.error_text is not None and "is unavailable" in answer.error_text and word in answer.error_text
        assert {"weather", "billing"}.isdisjoint(spec.id for spec in session.start_turn().tool_specs)
        shown = {check.name: check.detail for check in check_kernel(kernel)}
        assert {"tool weather", "tool billing"} <= set(shown)


@pytest.mark.proves("R-02", "R-03", "L-01")
async def test_folder_tools_are_called_like_other_tools_and_a_persistent_one_starts_once(tmp_path: Path) -> None:
    tools = tmp_path / "config" / "tools"
    put_tool(tools, "once")
    put_tool(tools, "stays", persistent=True)
    (tools / "stays").write_text(
        "#!/usr/bin/env python3\n"
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'id': json.loads(line)['id'], 'result': os.stat('/proc/self').st_ctime_ns}), flush=True)\n"
    )
    async with temporary_kernel(tmp_path, rules=["allow *"]) as kernel:
        session, other = await kernel.session(), await kernel.session()
        assert (await session.call("once", {})).data == {"tool": "once"}
        answers = [await one.call("stays", {}) for one in (session, session, other)]
        assert all(answer.ok for answer in answers), answers
        assert len({answer.data for answer in answers}) == 1  # one process, from its first call on
        assert {answer.metadata["sandbox"] for answer in answers} == {kernel.sandbox_tier.name}


@pytest.mark.proves("O-01", "O-02")
@pytest.mark.parametrize("persistent", [False, True])
async def test_program_output_over_the_limit_is_truncated_and_readable_from_its_output_file(
    tmp_path: Path, persistent: bool
) -> None:
    tools = tmp_path / "config" / "tools"
    put_tool(tools, "long", max_output=1000, persistent=persistent)
    answer = "{'id': given['id'], 'result': {'text': text}}" if persistent else "{'text': text}"
    (tools / "long").write_text(
        "#!/usr/bin/env python3\n"
        "import json, sys\n"
        "given = json.loads(sys.stdin.readline())\n"
        "text = 'x' * 5000 + 'the end'\n"
        f"print(json.dumps({answer}), flush=True)\n"
    )
    async with temporary_kernel(tmp_path, rules=["allow long"]) as kernel:
        session = await kernel.session()
        cut = await session.call("long", {})
        assert cut.ok and cut.metadata["truncated"] is True and cut.metadata["output_bytes"] == 5007
        assert len(cut.data["head"]) <= 1000 and "the end" not in cut.data["head"]
        rest = await session.call("read", {"path": cut.metadata["output_path"], "unit": "bytes", "offset": 5000})
        assert rest.ok and rest.data["text"] == "the end"


class Holding:
    """A tool that holds the outbox until it is told to leave."""

    def __init__(self) -> None:
        inside, leave = self.inside, self.leave = asyncio.Event(), asyncio.Event()

        @tool(id="mail.hold", side_effect="external", locks=["outbox:X"])
        async def hold() -> str:
            """Hold the outbox."""
            inside.set()
            await leave.wait()
            return "held"

        self.tool = hold


@pytest.mark.proves("L-05")
async def test_a_lock_wait_times_out_after_its_configured_budget_and_runs_no_tool(tmp_path: Path) -> None:
    settings = "[limits]\nlock_wait_ms = 20\n"
    hold = Holding()
    async with temporary_kernel(tmp_path, tools=[send, hold.tool], rules=["allow *"], settings=settings) as kernel:
        session = await kernel.session()
        holding = asyncio.create_task(session.call("mail.hold", {}))
        await hold.inside.wait()
        late = await session.call("mail.send", {"to": "ann"})
        assert late.error_kind == "timeout" and late.error_text is not None
        assert "20 ms" in late.error_text and "Nothing was run" in late.error_text
        hold.leave.set()
        assert (await holding).ok


@pytest.mark.proves("L-05")
async def test_results_and_records_report_the_wait_for_locks_separately(tmp_path: Path) -> None:
    hold = Holding()
    async with temporary_kernel(tmp_path, tools=[send, hold.tool], rules=["allow *"]) as kernel:
        session = await kernel.session()
        seen: list[Event] = []
        session.watch_events(seen.append)
        holding = asyncio.create_task(session.call("mail.hold", {}))
        await hold.inside.wait()
        waiting = asyncio.create_task(session.call("mail.send", {"to": "ann"}))
        while not any(event.kind == "awaiting-locks" for event in seen):
            await asyncio.sleep(0)
        hold.leave.set()
        at_once, late = await holding, await waiting
        assert "lock_wait_ms" not in at_once.metadata and late.metadata["lock_wait_ms"] > 0
        await kernel.log.flush()
        intents = [record.body or {} for record in kernel.log.reader.records(kind="intended")]
        assert [intent.get("lock_wait_ms") for intent in intents] == [None, late.metadata["lock_wait_ms"]]


async def test_a_single_text_in_place_of_a_list_of_rules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"rules=\['allow read'\]"):
        async with temporary_kernel(tmp_path, rules="allow read"):
            pass
    async with temporary_kernel(tmp_path) as kernel:
        with pytest.raises(UsageError, match="one text"):
            await kernel.session(rules="allow read")
        with pytest.raises(UsageError, match="one text"):
            await kernel.explain_call("read", {"path": "a"}, rules="deny read")


async def test_each_faulty_rule_is_reported_once_with_its_location(tmp_path: Path) -> None:
    with pytest.raises(LoadError) as caught:
        async with temporary_kernel(tmp_path, rules=["permit read"], settings='rules = ["allow raed"]\n'):
            pass
    file = tmp_path / "config" / "handrail.toml"
    first, second = str(caught.value).splitlines()[1:]
    assert first.startswith(f"  - {file}:1: Invalid rule 'allow raed': 'raed' is not a tool")
    assert second.startswith("  - given at the start: Invalid rule 'permit read': 'permit' is not an action")


@pytest.mark.proves("P-04")
async def test_examples_of_a_rule_are_checked_in_every_source_of_rules(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    config = tmp_path / "handrail.toml"
    config.write_text(
        'rules = [\n  "deny bash rm *",\n  { rule = "allow bash git diff *", match = ["git diff src", "git diff -p"] },\n]\n'
    )
    options: dict[str, Any] = {"state": tmp_path / "state", "config": config}
    with pytest.raises(LoadError) as caught:
        async with open_kernel(tmp_path / "ws", **options):
            pass
    (fault,) = caught.value.diagnostics
    assert fault.source == f"{config}:3"
    assert "'git diff -p'" in fault.problem and "'-p'" in fault.problem
    config.write_text('rules = [{ rule = "allow bash git diff *", match = ["git diff src"], nomatch = ["x"] }]\n')
    with pytest.raises(LoadError, match=r"rules\[0\].nomatch: unknown key; did you mean 'not_match'"):
        async with open_kernel(tmp_path / "ws", **options):
            pass
    config.write_text('rules = [{ rule = "allow bash git diff *", match = ["git diff src"] }]\n')
    async with open_kernel(
        tmp_path / "ws", **options, rules=[{"rule": "deny read private/**", "not_match": ["public/a"]}]
    ) as kernel:
        assert (await kernel.explain_call("bash", {"command": "git diff src"})).action == "allow"
        assert (await kernel.explain_call("read", {"path": "private/a"})).action == "deny"
        with pytest.raises(LoadError, match="does not match its example 'b'"):
            await kernel.session(rules=[{"rule": "deny read a", "match": ["b"]}])
        with pytest.raises(LoadError, match="matches its example 'private/a' of not_match"):
            await kernel.session(rules=[{"rule": "deny read private/**", "not_match": ["private/a"]}])


async def test_a_configuration_with_too_many_rules_is_refused_with_its_location(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    config = tmp_path / "handrail.toml"
    rules = "".join(f'  "allow bash git log {number}",\n' for number in range(MAX_RULES + 1))
    config.write_text(f"rules = [\n{rules}]\n")
    with pytest.raises(LoadError) as caught:
        async with open_kernel(tmp_path / "ws", state=tmp_path / "state", config=config):
            pass
    (fault,) = caught.value.diagnostics
    assert fault.source.startswith(f"{config}:") and "Too many rules: 2,001. The maximum is 2,000" in fault.problem
