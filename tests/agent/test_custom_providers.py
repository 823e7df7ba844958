"""Models of providers from a program or package, and keys that a program passes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tests.agent.provider_bench import SERVERS, Kind, each_provider

from handrail import Agent, Session, StartError, UsageError, open_kernel, open_model
from handrail.agent.providers import SERVICES, open_subagent_model
from handrail.models import BlockEvent, ModelRequest, ReplyFinished, TextDelta, find_dialect
from handrail.testing import ErrorReply, PlaybackModel, ScriptedReply, call_reply, text_reply
from handrail.testing.scripted_kernel import temporary_kernel


class Parrot:
    """A model that says what it was opened with."""

    dialect = find_dialect("openai-chat")

    def __init__(self, name: str, api_key: str | None, base_url: str | None) -> None:
        self.name = f"parrot:{name}"
        self.opened_with = (name, api_key, base_url)

    async def stream(self, request: ModelRequest) -> AsyncIterator[BlockEvent]:
        yield TextDelta(f"{self.name} heard {len(request.messages)}")
        yield ReplyFinished("end")

    async def aclose(self) -> None:
        pass


def open_parrot(name: str, *, api_key: str | None, base_url: str | None) -> Parrot:
    return Parrot(name, api_key, base_url)


@asynccontextmanager
async def opened_session() -> AsyncGenerator[Session]:
    async with temporary_kernel() as kernel:
        yield await kernel.session()


def install(monkeypatch: pytest.MonkeyPatch, **providers: str) -> None:
    """Offer providers as an installed package does."""
    points = tuple(metadata.EntryPoint(name, value, "handrail.models") for name, value in providers.items())

    def find(group: str) -> tuple[metadata.EntryPoint, ...]:
        return points if group == "handrail.models" else ()

    monkeypatch.setattr("handrail.store.entry_point_cache.list_entry_points_outside_workspaces", find)


@each_provider
async def test_a_passed_key_is_sent_instead_of_the_key_in_the_environment(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVICES[kind][0], "of the environment")
    async with SERVERS[kind](ScriptedReply("hello")) as server, opened_session() as session:
        model = open_model(f"{kind}:some-model", base_url=server.base_url, api_key=server.key)
        outcome = await Agent(session, model).complete("Hi.")
        assert outcome.text == "hello", outcome
        await model.aclose()


@each_provider
async def test_sub_agents_use_the_key_only_for_the_same_provider_and_server(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SERVICES[kind][0], "of the environment")
    async with SERVERS[kind](ScriptedReply("one")) as ours, SERVERS[kind](ErrorReply(500, "not reached")) as theirs:
        parent = open_model(f"{kind}:big", base_url=ours.base_url, api_key=ours.key)
        child = open_subagent_model(parent, f"{kind}:small")
        async with opened_session() as session:
            assert (await Agent(session, child).complete("Hi.")).text == "one"
            elsewhere = open_subagent_model(parent, f"{kind}:small", theirs.base_url)
            outcome = await Agent(session, elsewhere).complete("Hi.")
            assert "rejected the key" in outcome.detail and ours.key not in outcome.detail
        for model in (parent, child, elsewhere):
            assert ours.key not in repr(model)
            await model.aclose()


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="Invalid `api_key`: it is empty"):
        open_model("openai:x", api_key=key)


def test_a_scripted_model_refuses_a_key() -> None:
    with pytest.raises(UsageError, match="Remove the API key"):
        open_model("script:x.toml", api_key="k")


async def test_a_provider_given_in_code_opens_models_for_agents_and_their_sub_agents(tmp_path: Path) -> None:
    lead = {"id": "lead", "delegation": {"agents": ["bird"]}, "rules": ["allow task"]}
    bird = {"id": "bird", "role": "subagent", "model": "parrot:grey"}
    parent = PlaybackModel(call_reply(("task", {"subagent_type": "bird", "prompt": "Say it."})), text_reply("Said."))

    def open_lead(name: str, *, api_key: str | None, base_url: str | None) -> PlaybackModel:
        assert (name, api_key, base_url) == ("it", None, None)
        return parent

    model = open_model("lead:it", providers={"lead": open_lead, "parrot": open_parrot})
    (tmp_path / "ws").mkdir()
    async with open_kernel(
        tmp_path / "ws", state=tmp_path / "state", agent=lead, agents=[bird], settings=["search.embedder=none"]
    ) as kernel:
        session = await kernel.session()
        assert (await Agent(session, model).complete("Go.")).text == "Said."
        await kernel.log.flush()
        results = [record.body for record in kernel.log.reader.records(kind="committed")]
        assert "parrot:grey heard 1" in str(results)
    await model.aclose()


def test_a_provider_from_an_installed_package_opens_models(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, parrot=f"{__name__}:open_parrot")
    model = open_model("parrot:grey:small", api_key="k", base_url="http://localhost:1")
    assert isinstance(model, Parrot) and model.opened_with == ("grey:small", "k", "http://localhost:1")
    again = open_subagent_model(model, "parrot:green")
    assert isinstance(again, Parrot) and again.opened_with == ("green", "k", "http://localhost:1")


def test_no_package_replaces_a_built_in_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, openai=f"{__name__}:open_parrot", script=f"{__name__}:open_parrot")
    assert not isinstance(open_model("openai:x", api_key="k"), Parrot)
    with pytest.raises(UsageError, match="'openai' is a built-in provider"):
        open_model("openai:x", providers={"openai": open_parrot})


def test_the_error_for_an_unknown_provider_lists_the_available_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, parrot=f"{__name__}:open_parrot")
    with pytest.raises(UsageError, match=r"'dog:x'.*openai:NAME.*Further providers: cat, parrot\."):
        open_model("dog:x", providers={"cat": open_parrot})


@pytest.mark.parametrize(
    ("provider", "problem"),
    [
        (f"{__name__}:missing", "AttributeError"),
        (f"{__name__}:no_model", "returned int"),
        (f"{__name__}:fails", r"ValueError: bad key \*\*\*"),
        ("no_such_module:x", "ModuleNotFoundError"),
    ],
)
def test_the_error_for_a_broken_provider_package_names_the_provider(
    monkeypatch: pytest.MonkeyPatch, provider: str, problem: str
) -> None:
    install(monkeypatch, bad=provider)
    with pytest.raises(StartError, match=rf"'bad' from {provider}.*{problem}") as caught:
        open_model("bad:x", api_key="secret-1")
    assert "secret-1" not in str(caught.value) and caught.value.__cause__ is None


def no_model(name: str, **given: Any) -> Any:
    return 3


def fails(name: str, *, api_key: str | None, base_url: str | None) -> Any:
    raise ValueError(f"bad key {api_key}")
