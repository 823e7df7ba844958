"""One session that an editor has open: its prompts, their updates, and the user's options."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, cast

from acp import schema
from acp.exceptions import RequestError

from handrail.agent.agent_loop import Agent
from handrail.agent.conversation import UnansweredExchange, restore_conversation
from handrail.agent.model_protocol import (
    AssistantMessage,
    CallResultsMessage,
    HistoryCallPart,
    Message,
    Model,
    TextPart,
    UserMessage,
    convert_pictures_to_blobs,
    create_message_with_stored_pictures,
    load_pictures_into_messages,
    takes_pictures,
)
from handrail.agent.run_events import (
    CallAnswered,
    NotificationsDelivered,
    ReplyInterrupted,
    RunFinished,
    RunOutcome,
    TextDelta,
)
from handrail.contract.calls_and_results import Blob, Event, Result
from handrail.contract.errors import HandrailError, UsageError
from handrail.contract.permission_modes import Mode
from handrail.contract.services.history_and_skill_services import SkillInfo
from handrail.contract.session_protocols import Session
from handrail.contract.struct import Struct, field
from handrail.frontends.acp import editor_call_format
from handrail.frontends.acp.editor_updates import UpdateSender
from handrail.policy.rules.rules_and_modes import MODE_DESCRIPTIONS, MODES, parse_mode

# The options of the user at an editor: the mode, the model, and a skill by a slash command.

COMPACT = "compact"
"""The slash command that compacts the conversation."""
MODE_OPTION, MODEL_OPTION = "mode", "model"
"""The IDs of the options."""
_COMMAND = re.compile(r"\s*/([^\s/]+)(?:\s+(.*))?", re.DOTALL)
Option = schema.SessionConfigOptionSelect | schema.SessionConfigOptionBoolean


def make_config_options(mode: Mode, model: str, models: Sequence[str]) -> list[Option]:
    """Return all options with their current values, in the protocol's form.

    :param models: the available models; with fewer than two the option is left out
    """
    modes = [schema.SessionConfigSelectOption(value=one, name=one, description=MODE_DESCRIPTIONS[one]) for one in MODES]
    found: list[Option] = [_select_option(MODE_OPTION, "Mode", "Which calls run without your approval", mode, modes)]
    if len(models) > 1:
        known = [schema.SessionConfigSelectOption(value=one, name=one) for one in models]
        found.append(
            _select_option(MODEL_OPTION, "Model", "The model that answers from the next prompt on", model, known)
        )
    return found


def _select_option(
    id: str, name: str, about: str, now: str, values: list[schema.SessionConfigSelectOption]
) -> schema.SessionConfigOptionSelect:
    return schema.SessionConfigOptionSelect(
        type="select",
        id=id,
        name=name,
        description=about,
        category="mode" if id == MODE_OPTION else "model",
        current_value=now,
        options=values,
    )


def make_slash_commands_update(skills: Sequence[SkillInfo]) -> schema.AvailableCommandsUpdate:
    """Return the slash commands: compaction, and the skills with their origin.

    A skill with the name of another command is left out.
    """
    about = "Free up context: replace older messages with an outline or a summary"
    found = [schema.AvailableCommand(name=COMPACT, description=about)]
    for skill in skills:
        if skill.name == COMPACT:
            continue
        brought = skill.layer == "workspace"
        found.append(
            schema.AvailableCommand(
                name=skill.name,
                description=f"{skill.description} (a skill {'of the workspace' if brought else 'of ' + _OF[skill.layer]})",
                input=schema.AvailableCommandInput(schema.UnstructuredCommandInput(hint="the task for the skill")),
                field_meta={
                    "handrail/skill": skill.layer,
                    **({"handrail/untrusted_source": "the workspace"} if brought else {}),
                },
            )
        )
    return schema.AvailableCommandsUpdate(session_update="available_commands_update", available_commands=found)


_OF = {"user": "this installation", "shipped": "Handrail"}


def is_compact_command(task: str) -> bool:
    """Return whether a prompt is only the command for compaction."""
    return task.strip() == f"/{COMPACT}"


def expand_skill_command(task: str, session: Session) -> str:
    """Return the task for the model. If it begins with a skill's command, it names the skill.

    The model reads the skill with its tool, under the usual rules and labels. So text of a workspace never becomes text of
    the user.
    """
    if (match := _COMMAND.fullmatch(task)) is None or match[1] not in {skill.name for skill in session.skills}:
        return task  # a path, say
    rest = (match[2] or "").strip() or "Follow the skill."
    return f"[The user picked the skill {match[1]!r}. First read it with the tool skill.]\n\n{rest}"


INTERNAL_ERROR, INVALID_PARAMS = -32603, -32602
MAX_PROMPT_CHARACTERS = 4 * 1024 * 1024
"""Maximum characters of one prompt, with its embedded resources."""
_END = re.compile(r"<(?=\s*/\s*embedded)", re.IGNORECASE)
"""Text that a model might read as the end of an embedded document."""


class EditorSession(Struct, eq=False):
    """A session that an editor has open, with its agent and its updates.

    :param folder: the canonical path of the workspace
    :param client_ready: set when the client knows the session
    :param models: the models that the user can choose from; the initial one comes first
    :param make_agent: returns an agent for the session with another model
    :param startup_notes: notes for the user before the first answer
    """

    session: Session
    agent: Agent
    model: Model
    updates: UpdateSender
    folder: str
    client_ready: asyncio.Event
    models: Sequence[str] = ()
    make_agent: Callable[[str], tuple[Agent, Model]] | None = None
    model_name: str = ""
    """The name of the current model."""
    startup_notes: list[str] = field(default_factory=list[str])
    _running: asyncio.Task[schema.PromptResponse] | None = None
    _shown_mode: Mode | None = None
    """The mode that the editor shows."""
    _is_cancelled: bool = False
    _is_leaving: bool = False
    _previous_agents: list[tuple[Agent, Model]] = field(default_factory=list[tuple[Agent, Model]])
    """Earlier agents and their models whose sub-agents still work."""

    @property
    def mode(self) -> Mode:
        """The current mode of the session."""
        return self.session.mode

    @property
    def modes(self) -> schema.SessionModeState:
        available = [schema.SessionMode(id=mode, name=mode, description=MODE_DESCRIPTIONS[mode]) for mode in MODES]
        self._shown_mode = self.mode
        return schema.SessionModeState(current_mode_id=self.mode, available_modes=available)

    def set_mode(self, mode: str) -> None:
        """Set the mode of the session.

        :raises RequestError: for an unknown mode
        """
        try:
            wanted = parse_mode(mode)
        except ValueError as error:
            raise RequestError(INVALID_PARAMS, str(error)) from None
        self.session.set_mode(wanted)
        self._send_mode(wanted)

    def forward_mode_change(self, event: Event) -> None:
        """Send the new mode to the editor if an event of the session reports one."""
        if event.kind == "mode-changed":
            self._send_mode(event.data["mode"])

    def _send_mode(self, mode: Mode) -> None:
        if mode != self._shown_mode:
            self._shown_mode = mode
            self.updates.queue_update(
                schema.CurrentModeUpdate(session_update="current_mode_update", current_mode_id=mode)
            )
            self._send_options()

    # ── options ──────────────────────────────────────────────────────────────────────────────────

    @property
    def options(self) -> list[Option]:
        return make_config_options(self.mode, self.model_name, self.models)

    async def set_option(self, option: str, value: str | bool) -> None:
        """Set an option of the session.

        :raises RequestError: for an unknown option or value, and for another model while the current one works
        """
        known = {one.id: one for one in self.options}
        if option not in known or not isinstance(value, str):
            text = f"Invalid option {option[:80]!r} or value. The options are: {', '.join(known)}."
            raise RequestError(INVALID_PARAMS, text)
        if option == MODE_OPTION:
            self.set_mode(value)
        elif value not in self.models or self.make_agent is None:
            text = f"Unknown model {value[:80]!r}. The models are: {', '.join(self.models)}."
            raise RequestError(INVALID_PARAMS, text)
        elif self._running is not None:
            text = "The model cannot be changed during a prompt. Cancel the prompt, or wait for its answer."
            raise RequestError(INVALID_PARAMS, text)
        elif value != self.model_name:
            before = self.agent, self.model
            self.agent, self.model = self.make_agent(value)
            self.model_name = value
            if before[0].subagents.is_busy:
                self._previous_agents.append(before)
            else:
                await before[1].aclose()
            self._send_options()

    def _send_options(self) -> None:
        update = schema.ConfigOptionUpdate(session_update="config_option_update", config_options=self.options)
        self.updates.queue_update(update)

    def send_slash_commands(self) -> None:
        """Send the slash commands that the user can pick."""
        self.updates.queue_update(
            make_slash_commands_update(self.session.skills if self.updates.has_tool("skill") else ())
        )

    # ── prompts ──────────────────────────────────────────────────────────────────────────────────

    async def run_prompt(self, task: str, pictures: Sequence[Blob] = ()) -> schema.PromptResponse:
        """Let the agent work on ``task``, and send its text and calls to the editor meanwhile.

        :param pictures: images of the user's prompt
        :raises RequestError: if another prompt is running, the model does not accept images, or the run failed
        """
        if self._running is not None:
            text = "The session is already working on a prompt. Cancel that prompt, or wait for its answer."
            raise RequestError(INVALID_PARAMS, text)
        if pictures and not takes_pictures(self.model):
            raise RequestError(
                INVALID_PARAMS,
                f"The model {self.model_name or self.model.name} does not accept images. Describe them, or choose another model.",
            )
        self._is_cancelled = False
        compacts = is_compact_command(task) and not pictures
        work = self._compact() if compacts else self._run_task(expand_skill_command(task, self.session), pictures)
        running = self._running = asyncio.create_task(work)
        running.add_done_callback(self._on_prompt_done)
        return await asyncio.shield(running)  # the SDK cancels its handlers when the client disconnects

    def _on_prompt_done(self, task: asyncio.Task[schema.PromptResponse]) -> None:
        self._running = None
        if not task.cancelled():
            task.exception()  # mark it as retrieved, because the client may have disconnected

    def cancel_prompt(self) -> None:
        """Cancel the prompt: stop and answer every running call. The prompt ends as ``cancelled``."""
        if self._running is not None:
            self._is_cancelled = True
            self.agent.cancel("user")

    async def _compact(self) -> schema.PromptResponse:
        """Compact the conversation, and report the result to the user."""
        try:
            self._send_startup_notes()
            self.updates.queue_model_text(str(await self.agent.compact()))
            return schema.PromptResponse(stop_reason="end_turn")
        except HandrailError as error:
            if self._is_cancelled:
                return schema.PromptResponse(stop_reason="cancelled")
            raise RequestError(INTERNAL_ERROR, str(error)) from None
        finally:
            self.updates.show_subagent_calls_completed()
            await self.updates.wait_until_delivered()

    async def _run_task(self, task: str, pictures: Sequence[Blob]) -> schema.PromptResponse:
        outcome: RunOutcome | None = None
        try:
            if not self._is_cancelled:  # the user may cancel before the work begins
                self._send_startup_notes()
                user_message = await create_message_with_stored_pictures(task, pictures, self.session.history)
                async with aclosing(self.agent.run(user_message)) as events:
                    async for event in events:
                        match event:
                            case TextDelta(text):
                                self.updates.queue_model_text(text)
                            case CallAnswered(_, _, answer):
                                self.updates.show_call_answer(answer)
                            case ReplyInterrupted(reason, again):
                                self.updates.queue_model_text(
                                    f"\n\n[The reply was cut off: {reason}{'; retrying' if again else ''}]\n\n"
                                )
                            case NotificationsDelivered(notices):
                                self.updates.send_notification_as_thought(
                                    "".join(f"[{one.source}: {one.text}]\n" for one in notices)
                                )
                            case RunFinished():
                                outcome = event.outcome
                            case _:
                                pass
            return self._response(outcome)
        except HandrailError as error:
            if self._is_cancelled:
                return schema.PromptResponse(stop_reason="cancelled")
            raise RequestError(INTERNAL_ERROR, str(error)) from None
        finally:
            self.updates.show_subagent_calls_completed()
            await self.updates.wait_until_delivered()

    def _send_startup_notes(self) -> None:
        for remark in self.startup_notes:
            self.updates.queue_model_text(f"{remark}\n\n")
        self.startup_notes.clear()

    def _response(self, outcome: RunOutcome | None) -> schema.PromptResponse:
        if outcome is None or self._is_cancelled:
            return schema.PromptResponse(stop_reason="cancelled", usage=_usage(outcome))
        if outcome.status == "failed":
            raise RequestError(INTERNAL_ERROR, outcome.detail or "The model returned no complete reply.")
        if outcome.status not in ("answered", "cancelled"):
            self.updates.queue_model_text(f"\n\n[{outcome.detail}]")
        if outcome.status == "awaiting_approval":
            self.updates.queue_model_text(" Answer with `handrail approve`, then send another prompt.")
        reason = "cancelled" if self._is_leaving else _stop_reason(outcome)
        return schema.PromptResponse(stop_reason=reason, usage=_usage(outcome))

    # ── earlier messages ─────────────────────────────────────────────────────────────────────────

    async def replay_conversation(self) -> None:
        """Send the client the whole conversation, with the calls that still wait.

        :raises HandrailError: if the conversation cannot be read, or not all of it can be sent
        """
        history = self.session.history
        found = restore_conversation([] if history is None else await history.read_stored_messages())
        messages = found.messages if history is None else await load_pictures_into_messages(found.messages, history)
        plan = await self._replay_messages(messages)
        if found.open is not None:
            self._replay_open_exchange(found.open)
        if (update := editor_call_format.make_plan_update(plan)) is not None:
            self.updates.queue_update(update)
        await self.updates.wait_until_delivered()
        if (failure := self.updates.failure) is not None:
            raise UsageError(
                f"Could not send part of the conversation: {type(failure).__name__}: {failure}. Load the session again."
            )
        if self.updates.is_closed:
            raise UsageError(
                "The session was closed, or the client disconnected, before the conversation was sent. Load the session again."
            )

    async def _replay_messages(self, messages: Sequence[Message]) -> object:
        """Send the client earlier messages, and return the last todo list among them."""
        plan: object = None
        calls: dict[str, tuple[str, HistoryCallPart]] = {}
        for number, message in enumerate(messages):
            match message:
                case UserMessage(text, pictures):
                    self.updates.replay_user_text(text)
                    for picture in pictures:
                        self.updates.replay_user_image(picture)
                case AssistantMessage():
                    calls = self._replay_reply(
                        message, [f"{self.session.id}/past-{number}.{n}" for n in range(len(message.calls))]
                    )
                case CallResultsMessage(results):
                    for result in results:
                        if (known := calls.get(result.wire_id)) is not None:
                            plan = self._replay_result(*known, result.text, failed=result.is_error) or plan
            await self.updates.wait_until_delivered()
        return plan

    def _replay_reply(
        self, message: AssistantMessage, call_ids: Sequence[str]
    ) -> dict[str, tuple[str, HistoryCallPart]]:
        ids = iter(call_ids)
        calls: dict[str, tuple[str, HistoryCallPart]] = {}
        for part in message.parts:
            if isinstance(part, TextPart):
                self.updates.queue_model_text(part.text)
            elif isinstance(part, HistoryCallPart):
                calls[part.wire_id] = (next(ids), part)
                self.updates.show_new_call(calls[part.wire_id][0], self._tool_id_of(part.name), part.arguments)
        return calls

    def _tool_id_of(self, name: str) -> str:
        return self.updates.resolve_tool_id(name)

    def _replay_open_exchange(self, exchange: UnansweredExchange) -> None:
        calls = self._replay_reply(exchange.message, exchange.call_ids)
        for result in exchange.results.values():
            if (known := calls.get(result.wire_id)) is not None:
                self._replay_result(*known, result.text, failed=result.is_error)

    def _replay_result(self, call_id: str, call: HistoryCallPart, text: str, *, failed: bool) -> object:
        """Show the result of a call, and return the todo list if the call changed it."""
        try:
            wire: Any = json.loads(text)
            result = Result.from_dict(cast("Mapping[str, Any]", wire))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            result = Result.output(text)
        self.updates.show_call_result(call_id, self._tool_id_of(call.name), result, "failed" if failed else "completed")
        data: Any = result.data
        return cast("dict[str, Any]", data).get("todos") if call.name == "todo" and isinstance(data, dict) else None

    # ── end of the session ───────────────────────────────────────────────────────────────────────

    async def suspend(self) -> None:
        """Suspend the session. Call :meth:`close_models_if_unused` afterwards.

        Running calls are stopped and answered. Calls that wait for approval, and sub-agents in the background, continue.
        """
        running = self._running
        self._is_leaving = True
        if running is not None:
            self.agent.cancel("shutdown")
            await asyncio.wait((running,))
        try:
            await self.session.suspend()
        finally:
            await self.updates.wait_until_delivered()
            await self.updates.aclose()

    @property
    def has_working_subagents(self) -> bool:
        """Whether sub-agents still work with its models."""
        return any(agent.subagents.is_busy for agent, _ in self._all_agents())

    async def close_models_if_unused(self) -> None:
        """Close its models when no sub-agent works with them."""
        async with AsyncExitStack() as closing:
            for agent, model in self._all_agents():
                closing.push_async_callback(model.aclose)
                await agent.subagents.wait_until_idle()

    def _all_agents(self) -> list[tuple[Agent, Model]]:
        return [*self._previous_agents, (self.agent, self.model)]


def _stop_reason(outcome: RunOutcome) -> schema.StopReason:
    match outcome.status:
        case "cancelled":
            return "cancelled"
        case "length":
            return "max_tokens"
        case "refused":
            return "refusal"
        case "budget":
            return "max_tokens" if outcome.budget == "tokens" else "max_turn_requests"
        case _:
            return "end_turn"


def _usage(outcome: RunOutcome | None) -> schema.Usage | None:
    if outcome is None:
        return None
    return schema.Usage(
        input_tokens=outcome.input_tokens,
        output_tokens=outcome.output_tokens,
        total_tokens=outcome.input_tokens + outcome.output_tokens,
    )


Block = (
    schema.TextContentBlock
    | schema.ImageContentBlock
    | schema.AudioContentBlock
    | schema.ResourceContentBlock
    | schema.EmbeddedResourceContentBlock
)


def parse_prompt_blocks(blocks: Sequence[Block]) -> tuple[str, list[Blob]]:
    """Return a prompt as one text, and its images.

    Embedded resources are in the text as data, with their URI.

    :raises RequestError: for content that this agent does not accept
    """
    parts: list[str] = []
    pictures: list[bytes] = []
    for block in blocks:
        match block:
            case schema.TextContentBlock():
                parts.append(block.text)
            case schema.ResourceContentBlock():
                parts.append(f"[{_inline_text(block.title or block.name)}]({_inline_text(block.uri)})")
            case schema.EmbeddedResourceContentBlock(resource=schema.TextResourceContents() as resource):
                body = _END.sub(r"<\\", resource.text)
                parts.append(f'<embedded uri="{_inline_text(resource.uri)}">\n{body}\n</embedded>\n')
            case (
                schema.ImageContentBlock(data=data)
                | schema.EmbeddedResourceContentBlock(resource=schema.BlobResourceContents(blob=data))
            ):
                pictures.append(_decode_image(data, len(pictures) + 1))
                parts.append(f"[image {len(pictures)}]")
            case _:
                raise RequestError(
                    INVALID_PARAMS,
                    f"Unsupported content of type `{block.type}`. Send text, links, embedded text or images, or name a file.",
                )
    task = "".join(parts)
    if not task.strip():
        raise RequestError(INVALID_PARAMS, "The prompt is empty. Send some text.")
    if len(task) > MAX_PROMPT_CHARACTERS:
        raise RequestError(
            INVALID_PARAMS,
            f"The prompt has {len(task):,} characters. The limit is {MAX_PROMPT_CHARACTERS:,}. Name a file instead.",
        )
    try:
        return task, convert_pictures_to_blobs(pictures)
    except UsageError as error:
        raise RequestError(INVALID_PARAMS, str(error)) from None


def _decode_image(data: str, number: int) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        raise RequestError(INVALID_PARAMS, f"Image {number} is not valid base64. Encode it again.") from None


def _inline_text(text: str) -> str:
    return " ".join(text.replace('"', "%22").split())
