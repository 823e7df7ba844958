"""A minimal session for tests of the loop: it records its input and answers from a table."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from handrail.contract.calls_and_results import CallAnswer, ProposedCall, Result
from handrail.contract.errors import ToolError
from handrail.contract.services.channels_and_triggers import NotificationQueue
from handrail.contract.services.history_and_skill_services import ConversationHistory, SkillInfo
from handrail.contract.services.subagent_services import SubagentRunner, SubagentTask, SubagentType
from handrail.contract.session_protocols import ChildSession
from handrail.contract.text.strict_json import InvalidJsonTextError, parse_arguments
from handrail.contract.tool.provider_tools import ProviderToolOffer
from handrail.contract.tool.spec import ToolSpec

ECHO = ToolSpec(
    id="echo",
    description="Gives its arguments back.",
    parameters={"type": "object", "properties": {"n": {"type": "integer"}}},
    side_effect="read",
    locks=(),
    guidance="Use echo to hear yourself.",
)
SEND = ToolSpec(id="mail.send", description="Sends.", side_effect="external", locks=())


def _echo(call: ProposedCall, arguments: dict[str, Any]) -> Result:
    return Result.output(arguments)


if TYPE_CHECKING:
    _Rest = Any  # what the loop does not use of a session is not here
else:
    _Rest = object


class RecordingTurn(_Rest):
    def __init__(self, session: RecordingSession) -> None:
        self._session = session
        self._mine: list[ProposedCall] = []

    @property
    def tool_specs(self) -> Sequence[ToolSpec]:
        return self._session.specs

    @property
    def number(self) -> int:
        return self._session.turns

    @property
    def tool_index(self) -> str:
        return self._session.index

    @property
    def provider_tools(self) -> Sequence[ProviderToolOffer]:
        return self._session.native

    def prepare_likely_call(self, call: ProposedCall) -> None:
        self._session.looked_at.append(call)

    def start_streamed_call(self, call: ProposedCall) -> asyncio.Task[CallAnswer]:
        self._mine.append(call)
        if len(self._mine) == 1:
            self._session.proposed.append(self._mine)
        call_id = f"s1/{self.number}.{len(self._mine) - 1}"
        return asyncio.get_running_loop().create_task(self._session.answer(call, call_id))


class RecordingSession(_Rest):
    """Echoes arguments. ``hold`` makes calls wait until they are cancelled or released."""

    def __init__(
        self,
        answer: Callable[[ProposedCall, dict[str, Any]], Result] | None = None,
        history: ConversationHistory | None = None,
    ) -> None:
        self.history = history
        self.notifications: NotificationQueue | None = None
        self.is_headless = False
        self.recorded: dict[str, Result] = {}
        """What :meth:`recall_all` finds; anything else is interrupted."""
        self.specs: list[ToolSpec] = [ECHO, SEND]
        self.index = ""
        self.native: list[ProviderToolOffer] = []
        self.looked_at: list[ProposedCall] = []
        self.begun: list[str] = []
        self.proposed: list[list[ProposedCall]] = []
        self.cancelled: list[str] = []
        self.turns = 0
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.release.set()
        self._answer = answer or _echo

    @property
    def id(self) -> str:
        return "s1"

    @property
    def calls(self) -> list[ProposedCall]:
        return [call for reply in self.proposed for call in reply]

    @property
    def ran(self) -> list[ProposedCall]:
        return [call for call in self.calls if call.problem is None]

    def hold(self) -> None:
        self.release.clear()

    subagent_types: Sequence[SubagentType] = ()
    skills: Sequence[SkillInfo] = ()
    delegates: SubagentRunner | None = None

    def set_subagent_runner(self, delegates: SubagentRunner | None) -> None:
        self.delegates = delegates

    async def open_child(self, call_id: str, delegation: SubagentTask) -> ChildSession:
        raise ToolError("there are no sub-agents here", kind="unavailable")

    async def start_interaction(self, text: str, *, headless: bool = False) -> None:
        self.begun.append(text)
        self.is_headless = headless

    async def call(self, tool: str, arguments: Mapping[str, Any], *, key: str | None = None) -> Result:
        return Result.error("unknown_tool", "there is nothing to read here")

    async def read_parent_instructions(self) -> Sequence[tuple[str, str]]:
        return ()

    def start_turn(self) -> RecordingTurn:
        self.turns += 1
        return RecordingTurn(self)

    def watch_stop(self, listener: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def cancel_running_calls(self, reason: str) -> None:
        self.cancelled.append(reason)
        self.release.set()

    async def recover_results(self, call_ids: Sequence[str]) -> list[CallAnswer]:
        found = {
            known_as: self.recorded.get(known_as) or Result.error("interrupted", "nobody knows")
            for known_as in call_ids
        }
        return [CallAnswer(known_as, "echo", found[known_as], found[known_as]) for known_as in call_ids]

    async def answer(self, call: ProposedCall, call_id: str) -> CallAnswer:
        self.started.set()
        await self.release.wait()
        return self._one(call, call_id)

    def _one(self, call: ProposedCall, call_id: str) -> CallAnswer:
        if call.problem is not None:
            result = Result.error(call.problem_kind, call.problem)
        elif self.cancelled:
            result = Result.error("cancelled", f"stopped ({self.cancelled[0]})")
        else:
            try:
                arguments = (
                    parse_arguments(call.arguments)
                    if isinstance(call.arguments, (str, bytes))
                    else dict(call.arguments)
                )
                result = self._answer(call, arguments)
            except InvalidJsonTextError as error:
                result = Result.error("invalid_input", str(error))
        result = result.with_metadata(duration_ms=1.5)
        return CallAnswer(call_id, call.name, result, result)
