"""Resources and prompts of the operator: read from resources.json, checked, and offered as in MCP."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from handrail import Kernel, LoadError, Result
from handrail.testing.scripted_kernel import ScriptedClient, temporary_kernel

OFFERING: dict[str, Any] = {
    "resources": [
        {"uri": "note:1", "name": "first", "mimeType": "text/plain", "text": "A note."},
        {"uri": "note:pixel", "name": "pixel", "mimeType": "image/png", "blob": base64.b64encode(b"\x89PNG").decode()},
        {"uri": "note:file", "name": "file", "file": "notes/a.md", "annotations": {"audience": ["user"]}},
    ],
    "resourceTemplates": [
        {
            "uriTemplate": "note:of/{year}/{+rest}",
            "name": "notes of a year",
            "mimeType": "application/json",
            "text": '{"year": "{{year}}", "rest": "{{ rest }}"}',
            "complete": {"year": ["2024", "2025"]},
        }
    ],
    "prompts": [
        {
            "name": "greet",
            "arguments": [{"name": "who", "required": True, "values": ["Ada", "Alan", "Grace"]}, {"name": "how"}],
            "messages": [{"role": "user", "content": "Greet {{who}} {{how}}."}],
        },
        {
            "name": "look",
            "description": "With a picture and a resource.",
            "arguments": [{"name": "uri"}],
            "messages": [
                {"role": "user", "content": {"type": "image", "data": "iVBO", "mimeType": "image/png"}},
                {"role": "user", "content": {"type": "resource", "resource": {"uri": "{{uri}}", "text": "of {{uri}}"}}},
            ],
        },
        {
            "name": "asks",
            "ask": {
                "who": {
                    "method": "elicitation/create",
                    "params": {
                        "message": "Who?",
                        "requestedSchema": {"type": "object", "properties": {"name": {"type": "string"}}},
                    },
                }
            },
            "messages": [{"role": "assistant", "content": "It is {{who.name}}."}],
        },
    ],
}


def put_offering(place: Path, told: object = OFFERING) -> Path:
    """Into the tool folder of a kernel in ``place``."""
    folder = place / "config" / "tools"
    (folder / "notes").mkdir(parents=True, exist_ok=True)
    (folder / "notes" / "a.md").write_text("# From a file\n")
    (folder / "resources.json").write_text(told if isinstance(told, str) else json.dumps(told))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kernel(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Kernel]:
    place = tmp_path_factory.mktemp("offering")
    put_offering(place)
    async with temporary_kernel(place) as kernel:
        yield kernel


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def call_tool(kernel: Kernel, tool: str, peer: ScriptedClient | None = None, **arguments: Any) -> Result:
    return await (await kernel.session(client=peer)).call(tool, arguments)


async def test_resources_are_listed_and_read_without_a_rule(kernel: Kernel) -> None:
    listed = (await call_tool(kernel, "resource.list")).data
    assert [one["uri"] for one in listed["resources"]] == ["note:1", "note:pixel", "note:file"]
    assert listed["resources"][2]["mimeType"] == "text/markdown"
    assert listed["resources"][2]["annotations"] == {"audience": ["user"]}
    assert listed["resourceTemplates"][0]["uriTemplate"] == "note:of/{year}/{+rest}"
    text = await call_tool(kernel, "resource.read", uri="note:1")
    assert text.data == {"contents": [{"uri": "note:1", "mimeType": "text/plain", "text": "A note."}]}
    assert "untrusted_source" not in text.metadata
    pixel = (await call_tool(kernel, "resource.read", uri="note:pixel")).data["contents"][0]
    assert pixel["blob"]["media_type"] == "image/png" and pixel["blob"]["bytes"] == 4
    file = (await call_tool(kernel, "resource.read", uri="note:file")).data["contents"][0]
    assert file["text"] == "# From a file\n"


async def test_a_template_builds_resources_and_its_inserted_values_are_not_expanded_again(kernel: Kernel) -> None:
    made = await call_tool(kernel, "resource.read", uri="note:of/2024/a/b%20%7B%7Byear%7D%7D")
    assert made.data["contents"][0]["text"] == '{"year": "2024", "rest": "a/b {{year}}"}'
    for uri in ("note:of/2024", "note:of//x", "note:2", "file:///etc/passwd", "note:file/../resources.json"):
        assert (await call_tool(kernel, "resource.read", uri=uri)).error_kind == "invalid_input"


async def test_prompts_are_filled_with_their_arguments(kernel: Kernel) -> None:
    (greet, look, _) = (await call_tool(kernel, "prompt.list")).data["prompts"]
    assert [one["name"] for one in greet["arguments"]] == ["who", "how"] and greet["arguments"][0]["required"]
    assert look["description"] == "With a picture and a resource."
    told = await call_tool(kernel, "prompt.get", name="greet", arguments={"who": "{{how}}", "how": "well"})
    assert told.data["messages"] == [{"role": "user", "content": {"type": "text", "text": "Greet {{how}} well."}}]
    picture, resource = (await call_tool(kernel, "prompt.get", name="look", arguments={"uri": "x:y"})).data["messages"]
    assert picture["content"]["data"]["media_type"] == "image/png"
    assert resource["content"]["resource"] == {"uri": "x:y", "text": "of x:y"}
    for arguments, said in (({}, "who"), ({"who": "a", "more": "b"}, "more")):
        refused = await call_tool(kernel, "prompt.get", name="greet", arguments=arguments)
        assert refused.error_kind == "invalid_input" and said in (refused.error_text or "")


async def test_a_prompt_requests_its_missing_input_from_the_client(kernel: Kernel) -> None:
    peer = ScriptedClient([{"who": {"action": "accept", "content": {"name": "Ada"}}}])
    told = await call_tool(kernel, "prompt.get", peer, name="asks")
    assert told.data["messages"][0]["content"]["text"] == "It is Ada."
    assert (await call_tool(kernel, "prompt.get", ScriptedClient(), name="asks")).error_kind == "denied"
    assert (await call_tool(kernel, "prompt.get", name="asks")).error_kind == "unavailable"


async def test_arguments_are_completed_by_prefix(kernel: Kernel) -> None:
    prompt, template = (
        {"type": "ref/prompt", "name": "greet"},
        {"type": "ref/resource", "uri": "note:of/{year}/{+rest}"},
    )
    found = await call_tool(kernel, "prompt.complete", ref=prompt, argument={"name": "who", "value": "a"})
    assert found.data == {"values": ["Ada", "Alan"], "total": 2, "hasMore": False}
    found = await call_tool(kernel, "prompt.complete", ref=template, argument={"name": "year", "value": ""})
    assert found.data["values"] == ["2024", "2025"]
    assert (await call_tool(kernel, "prompt.complete", ref=prompt, argument={"name": "no", "value": ""})).data[
        "values"
    ] == []


FAULTY: list[tuple[str, Any, str]] = [
    ("no-json", "{", "resources.json"),
    ("unknown-member", {"tools": []}, "tools"),
    ("no-uri", {"resources": [{"name": "a", "text": ""}]}, "resources[0].uri"),
    ("no-scheme", {"resources": [{"uri": "a b", "name": "a", "text": ""}]}, "resources[0].uri"),
    ("twice", {"resources": [{"uri": "a:b", "name": "a", "text": ""}] * 2}, "listed twice"),
    ("two-contents", {"resources": [{"uri": "a:b", "name": "a", "text": "", "file": "x"}]}, "one of text"),
    ("no-base64", {"resources": [{"uri": "a:b", "name": "a", "blob": "?"}]}, "not valid base64"),
    ("no-file", {"resources": [{"uri": "a:b", "name": "a", "file": "no.md"}]}, "no.md"),
    ("a-file-outside", {"resources": [{"uri": "a:b", "name": "a", "file": "../handrail.toml"}]}, "in the folder"),
    ("a-file-by-a-link", {"resources": [{"uri": "a:b", "name": "a", "file": "linked"}]}, "link"),
    ("a-file-past-a-link", {"resources": [{"uri": "a:b", "name": "a", "file": "away/hosts"}]}, "link"),
    ("no-variable", {"resourceTemplates": [{"uriTemplate": "a:b", "name": "a", "text": ""}]}, "variables"),
    ("odd-variable", {"resourceTemplates": [{"uriTemplate": "a:{b*}", "name": "a", "text": ""}]}, "variables"),
    ("stray-name", {"resourceTemplates": [{"uriTemplate": "a:{b}", "name": "a", "text": "{{c}}"}]}, "'c'"),
    ("no-messages", {"prompts": [{"name": "p", "messages": []}]}, "messages"),
    ("stray-argument", {"prompts": [{"name": "p", "messages": [{"role": "user", "content": "{{x}}"}]}]}, "'x'"),
    (
        "odd-content",
        {"prompts": [{"name": "p", "messages": [{"role": "user", "content": {"type": "x"}}]}]},
        "resource_link",
    ),
]


@pytest.mark.parametrize(("told", "said"), [one[1:] for one in FAULTY], ids=[one[0] for one in FAULTY])
async def test_a_faulty_offering_stops_the_start_and_the_error_names_its_place(
    tmp_path: Path, told: Any, said: str
) -> None:
    folder = put_offering(tmp_path, told)
    os.symlink("/etc/hosts", folder / "linked")
    os.symlink("/etc", folder / "away")
    with pytest.raises(LoadError) as caught:
        async with temporary_kernel(tmp_path):
            pass
    assert said in str(caught.value)
