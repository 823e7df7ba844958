"""Tools and replies in the form of each provider."""

from __future__ import annotations

import pytest
from tests.agent.sessions import RecordingSession

from handrail.agent.agent_loop import Agent
from handrail.catalog.provider_dialects import ANTHROPIC
from handrail.catalog.schema_adapter import adapt_schema
from handrail.contract.tool.spec import ToolSpec
from handrail.testing.provider_request_checks import PlaybackModel, call_reply, text_reply


@pytest.mark.proves("D-11")
async def test_a_call_is_proposed_with_the_original_names_of_renamed_parameters() -> None:
    session = RecordingSession()
    spec = ToolSpec(
        id="odata",
        description="Ask.",
        parameters={"type": "object", "properties": {"$filter": {"type": "string"}}, "required": ["$filter"]},
        side_effect="read",
        locks=(),
    )
    session.specs = [spec]
    (sent,) = adapt_schema(spec.parameters, ANTHROPIC).renamed
    model = PlaybackModel(call_reply(("odata", {sent: "x eq 1"})), text_reply("Done."), dialect=ANTHROPIC)
    assert (await Agent(session, model).complete("ask")).ok
    assert sent != "$filter"
    assert session.ran[0].arguments == {"$filter": "x eq 1"}
