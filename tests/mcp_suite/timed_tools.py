"""The two fixtures with a time limit for their first message, as functions in the server's process.

Its scenario ``server-stateless`` gives up on a call of ``test_streaming_elicitation`` after 600 ms and on one of
``test_logging_tool`` after 500 ms, and makes both directly after a server's start. As programs of the pack they would be
started for that, confined; on a machine with much else to do this alone can take longer, and says nothing of the server.
"""

from __future__ import annotations

from handrail import Tool, tool
from handrail.contract.services.client_services import RequestToClient
from handrail.contract.services.tool_runtime import Runtime


@tool(id="test_logging_tool", side_effect="read", locks=[])
async def logs(runtime: Runtime) -> str:
    """Logs one message."""
    runtime.log("info", "A message that only a client that asked for it gets")
    return "Logged."


@tool(id="test_streaming_elicitation", side_effect="read", locks=[], requires={"capabilities": ["elicit"]})
async def asks_for_a_name(runtime: Runtime) -> str:
    """Asks for a name."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    params = {"mode": "form", "message": "What is your name?", "requestedSchema": schema}
    answer = (await runtime.client.send_requests({"form": RequestToClient("elicitation/create", params)}))["form"]
    return f"Elicitation completed: {answer.get('action')}"


TIMED_TOOLS: tuple[Tool, ...] = (logs, asks_for_a_name)
