"""Secrets of a kernel: only the tools that declare them receive them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from handrail import Runtime, ToolError, open_kernel, tool
from handrail.contract.errors import LoadError, UsageError
from handrail.contract.tool.spec import ConfigKey
from handrail.kernel.doctor import check_kernel
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.proves("S-06")
VALUE = "hunter2-of-the-test"


@tool(id="vault.length", side_effect="read", locks=[], secrets=["TOKEN"])
async def length(runtime: Runtime) -> dict[str, object]:
    """How long the token is."""
    token = runtime.secrets.get("TOKEN")
    try:
        runtime.secrets.get("OTHER")
    except ToolError as refused:
        return {"length": len(token), "shown": f"<{token}>", "other": refused.kind}
    return {"length": -1}


@tool(id="vault.ask", side_effect="read", locks=[], secrets=["TOKEN"], requires={"capabilities": ["call"]})
async def ask_another(runtime: Runtime) -> object:
    """Have another tool look for the token."""
    runtime.secrets.get("TOKEN")
    return (await runtime.call("vault.none", {})).to_dict()


@tool(id="vault.none", side_effect="read", locks=[])
async def without(runtime: Runtime) -> str:
    """Look for a token without having declared it."""
    return runtime.secrets.get("TOKEN")


@tool(id="vault.set", side_effect="read", locks=[], config={"password": ConfigKey("Of the account.", secret=True)})
async def setting(runtime: Runtime) -> dict[str, object]:
    """Say how long the setting is, and the setting."""
    password = runtime.secrets.get("password")
    return {"length": len(password), "shown": f"<{password}>", "config": dict(runtime.config)}


TOOLS = (length, ask_another, without, setting)


def configured(folder: Path, value: str = VALUE) -> str:
    file = folder / "token"
    file.write_text(value + "\n")
    file.chmod(0o600)
    return f'[secrets]\nTOKEN = {{ file = "{file}" }}\nOTHER = {{ env = "HANDRAIL_TEST_NOT_SET" }}\n'


@pytest.mark.proves("K-03", "O-07")
async def test_a_secret_setting_of_a_tool_resolves_to_the_named_secret_and_is_redacted(tmp_path: Path) -> None:
    named = '[tools."vault.set".config]\npassword = { secret = "TOKEN" }\n'
    more = '[tools."vault.set".config]\npassword = { secret = "TOKEN" }\nuser = { secret = "TOKEN" }\n'
    async with temporary_kernel(tmp_path / "a", tools=TOOLS, settings=configured(tmp_path)) as kernel:
        assert '[tools."vault.set".config]' in (kernel.generation.entries["vault.set"].unavailable_reason or "")
    async with temporary_kernel(
        tmp_path / "b", tools=TOOLS, rules=["allow vault.*"], settings=configured(tmp_path) + named
    ) as kernel:
        result = await (await kernel.session()).call("vault.set", {})
        assert result.data == {"length": len(VALUE), "shown": "<[secret:TOKEN]>", "config": {}}
    with pytest.raises(LoadError, match="user: unknown key"):
        async with temporary_kernel(tmp_path / "c", tools=TOOLS, settings=configured(tmp_path) + more):
            pass


@pytest.mark.proves("O-07")
async def test_a_configured_secret_reaches_the_tool_that_declares_it_and_is_redacted(tmp_path: Path) -> None:
    async with temporary_kernel(
        tmp_path, tools=TOOLS, rules=["allow vault.*"], settings=configured(tmp_path)
    ) as kernel:
        session = await kernel.session()
        result = await session.call("vault.length", {})
        assert result.data == {"length": len(VALUE), "shown": "<[secret:TOKEN]>", "other": "denied"}
        shown = repr([value.to_dict() for value in kernel.config.values]) + repr(check_kernel(kernel))
        assert "hunter2" not in shown and "TOKEN" in shown
    kept = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
    assert VALUE.encode() not in kept


async def test_a_nested_call_does_not_get_the_secrets_of_its_caller(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=["allow vault.*"], secrets={"TOKEN": VALUE}) as kernel:
        inner = (await (await kernel.session()).call("vault.ask", {})).data
        assert inner["metadata"]["error_kind"] == "denied" and "did not declare" in inner["error_text"]


async def test_a_configured_secret_that_cannot_be_redacted_is_withheld(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, tools=TOOLS, settings=configured(tmp_path, "a?c")) as kernel:
        withheld = kernel.generation.entries["vault.length"].unavailable_reason
        assert withheld is not None and "cannot be redacted" in withheld and "3 characters" in withheld


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("TOKEN", "abc", "3 characters"),
        ("TOKEN", 5, "int"),
        ("a b", VALUE, "not a valid name"),
        (7, VALUE, "not a valid name"),
    ],
)
async def test_a_secret_value_that_cannot_be_redacted_prevents_the_start(
    tmp_path: Path, name: Any, value: Any, why: str
) -> None:
    with pytest.raises(UsageError, match=rf"^Invalid `secrets`: .*{why}") as refused:
        async with temporary_kernel(tmp_path, secrets={name: value}):
            pass
    assert "hunter2" not in str(refused.value)


async def test_secrets_of_a_joined_process_reach_only_its_own_tools(tmp_path: Path) -> None:
    rules, state, config = ["allow vault.*"], tmp_path / "state", tmp_path / "config" / "handrail.toml"
    async with temporary_kernel(tmp_path, tools=TOOLS, rules=rules, secrets={"TOKEN": VALUE}) as holder:
        assert (await (await holder.session()).call("vault.length", {})).data["length"] == len(VALUE)
        async with open_kernel(tmp_path / "ws", tools=TOOLS, rules=rules, state=state, config=config) as bare:
            assert bare.generation.entries["vault.length"].unavailable_reason is not None, "the holder's are not theirs"
        with pytest.raises(UsageError, match=r"^Invalid `secrets`: .*3 characters"):
            async with open_kernel(tmp_path / "ws", secrets={"TOKEN": "abc"}, state=state, config=config):
                pass
        async with open_kernel(
            tmp_path / "ws", tools=TOOLS, rules=rules, secrets={"TOKEN": "hunter2-theirs"}, state=state, config=config
        ) as joined:
            assert type(joined) is not type(holder)
            result = await (await joined.session()).call("vault.length", {})
            assert result.data["length"] == len("hunter2-theirs") and result.data["shown"] == "<[secret:TOKEN]>"
        assert (await (await holder.session()).call("vault.length", {})).data["length"] == len(VALUE)


async def test_a_connected_process_uses_its_configured_secrets_for_its_own_tools(tmp_path: Path) -> None:
    async with temporary_kernel(tmp_path, settings=configured(tmp_path)):
        config = tmp_path / "config" / "handrail.toml"
        async with open_kernel(
            tmp_path / "ws", tools=TOOLS, rules=["allow vault.*"], state=tmp_path / "state", config=config
        ) as joined:
            result = await (await joined.session()).call("vault.length", {})
            assert result.data["length"] == len(VALUE), result


@tool(id="vault.shout", side_effect="read", locks=[])
async def shout(before: int) -> None:
    """Fail with a long text that has the token somewhere."""
    raise RuntimeError("x" * before + VALUE + "y" * 1000)


@pytest.mark.proves("O-07")
async def test_truncated_texts_contain_no_part_of_a_secret(tmp_path: Path) -> None:
    """Source: a value that is cut in the middle before the search for secrets."""
    async with temporary_kernel(tmp_path, tools=[shout], rules=["allow *"], secrets={"TOKEN": VALUE}) as kernel:
        session = await kernel.session()
        for before in range(478, 502, 3):
            assert VALUE[:6] not in str((await session.call("vault.shout", {"before": before})).error_text)
    kept = b"".join(path.read_bytes() for path in (tmp_path / "state").rglob("*") if path.is_file())
    assert VALUE[:6].encode() not in kept
