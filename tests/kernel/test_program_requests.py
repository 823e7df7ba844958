"""Persistent programs that send requests to a client: while one waits, other calls use further processes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from handrail.contract.services.client_services import ClientMethod, RequestToClient
from handrail.registry.sources import persistent_tools
from handrail.sandbox import tier_probe
from handrail.testing.scripted_kernel import temporary_kernel

pytestmark = pytest.mark.skipif(
    not tier_probe.choose_sandbox().tier.is_confining, reason=f"no sandbox: {tier_probe.choose_sandbox().tier.detail}"
)

PROGRAM = f"""#!{sys.executable} -S
import json, os, sys
NAME = os.urandom(8).hex()
for line in sys.stdin:
    call = json.loads(line)
    told = None
    if call["arguments"]["asks"]:
        ask = {{"method": "roots/list", "params": {{}}}}
        print(json.dumps({{"id": call["id"], "ask": {{"where": ask}}}}), flush=True)
        told = json.loads(sys.stdin.readline())["answers"]["where"]
    print(json.dumps({{"id": call["id"], "result": {{"process": NAME, "told": told}}}}), flush=True)
"""


class Client:
    """A client that answers when it is released."""

    def __init__(self) -> None:
        self.asked = asyncio.Queue[str]()
        self.may_answer = asyncio.Event()

    def supports(self, call_id: str, method: ClientMethod, params: Mapping[str, Any]) -> bool:
        return True

    async def send_requests(
        self, call_id: str, requests: Mapping[str, RequestToClient]
    ) -> Mapping[str, Mapping[str, Any]]:
        self.asked.put_nowait(call_id)
        await self.may_answer.wait()
        return {key: {"roots": [{"uri": f"file:///{call_id.rpartition('/')[2]}"}]} for key in requests}

    def detach(self, call_id: str) -> None:
        pass


def put_program(folder: Path) -> None:
    tools = folder / "config" / "tools"
    tools.mkdir(parents=True)
    parameters = {"type": "object", "properties": {"asks": {"type": "boolean"}}, "required": ["asks"]}
    llm = {"name": "locate", "description": "Says where it is.", "parameters": parameters}
    runtime: dict[str, Any] = {
        "side_effect": "read",
        "locks": [],
        "persistent": True,
        "requires": {"capabilities": ["roots"]},
    }
    (tools / "locate.json").write_text(json.dumps({"llm": llm, "runtime": runtime}))
    (tools / "locate").write_text(PROGRAM)
    (tools / "locate").chmod(0o755)


@pytest.mark.proves("R-03")
async def test_a_call_that_waits_for_its_client_does_not_block_other_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persistent_tools, "MAX_EXTRA_PROCESSES", 1)
    put_program(tmp_path)
    client = Client()
    async with temporary_kernel(tmp_path, rules=["allow locate"]) as kernel:
        session = await kernel.session(client=client)
        first = asyncio.create_task(session.call("locate", {"asks": True}))
        await client.asked.get()
        meanwhile = await session.call("locate", {"asks": False})
        second = asyncio.create_task(session.call("locate", {"asks": True}))
        await client.asked.get()
        queued = asyncio.create_task(session.call("locate", {"asks": False}))  # there are no more than these two
        client.may_answer.set()
        one, two, last = await first, await second, await queued
        assert one.ok and two.ok and last.ok and meanwhile.ok, (one, two, last, meanwhile)
        assert one.data["told"] != two.data["told"], "each has the answer to its own question"
        assert meanwhile.data["process"] == two.data["process"] != one.data["process"]
        assert last.data["process"] in (one.data["process"], two.data["process"])
