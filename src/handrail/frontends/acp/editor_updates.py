"""The updates of one session to an editor, sent in order and as fast as it reads."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

from acp import schema

from handrail.agent.model_protocol import UserPicture
from handrail.contract.approval_requests import ApprovalRequest
from handrail.contract.calls_and_results import CallAnswer, Event, Result
from handrail.contract.tool.spec import ToolSpec
from handrail.frontends.acp import editor_call_format
from handrail.frontends.acp.editor_terminals import CommandTerminal, EditorTerminals

Update = (
    schema.UserMessageChunk
    | schema.AgentMessageChunk
    | schema.AgentThoughtChunk
    | schema.ToolCallStart
    | schema.ToolCallProgress
    | schema.AgentPlanUpdate
    | schema.CurrentModeUpdate
    | schema.ConfigOptionUpdate
    | schema.AvailableCommandsUpdate
    | schema.SessionInfoUpdate
)
SendUpdate = Callable[[Update], Awaitable[None]]
MAX_QUEUED_PROGRESS = 1_000
"""Maximum number of queued updates. Beyond it, progress is dropped."""
_log = logging.getLogger("handrail.acp")


class UpdateSender:
    """A sender of the updates of one session to one client.

    :param send: sends one update; raises ``ConnectionError`` if the client has disconnected
    :param spec_of: returns a tool of the session by name
    """

    def __init__(
        self, send: SendUpdate, spec_of: Callable[[str], ToolSpec | None], workdir: str, screens: EditorTerminals
    ) -> None:
        self._send = send
        self._terminals = screens
        self._spec_of = spec_of
        self._workdir = workdir
        self._waiting: deque[Update] = deque()
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._known_calls: set[str] = set()
        """Calls that the client knows."""
        self._awaiting_approval: set[str] = set()
        self._jobs: dict[str, bool] = {}
        """Calls that continue as a job, and whether their answer, the job, was shown."""
        self._finished_jobs: set[str] = set()
        """Jobs that ended before their answer was shown."""
        self._subagent_calls: dict[str, str] = {}
        """Calls of sub-agents that required approval, with their tools."""
        self.is_closed = False
        """Whether updates are no longer sent: the client has disconnected, or this sender is closed."""
        self.failure: Exception | None = None
        """The error of an update that could not be sent to a connected client, for example as invalid JSON."""
        self._pump = asyncio.create_task(self._send_queued())

    async def aclose(self) -> None:
        await self._terminals.aclose()
        await self.wait_until_delivered()
        self.is_closed = True
        self._pump.cancel()
        await asyncio.wait((self._pump,))
        self._drained.set()

    async def wait_until_delivered(self) -> None:
        """Wait until the client has got all updates so far, or has disconnected."""
        await self._drained.wait()

    async def _send_queued(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting and not self.is_closed:
                try:
                    await self._send(self._waiting.popleft())
                except OSError:  # ConnectionError, or the error of a pipe whose other end is closed
                    self.is_closed = True
                except Exception as error:
                    self.failure = error
                    _log.warning("Could not send an update to the editor: %s: %s", type(error).__name__, error)
            if self.is_closed:
                self._waiting.clear()
            self._drained.set()

    def queue_update(self, update: Update) -> None:
        if self.is_closed:
            return
        self._waiting.append(update)
        self._drained.clear()
        self._wake.set()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def queue_model_text(self, words: str) -> None:
        """Send a piece of the model's text. Queued pieces are joined."""
        words = editor_call_format.escape_control_characters(words)
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, schema.AgentMessageChunk) and isinstance(last.content, schema.TextContentBlock):
            last.content.text += words
        elif words:
            self.queue_update(schema.AgentMessageChunk(session_update="agent_message_chunk", content=text_block(words)))

    def send_notification_as_thought(self, words: str) -> None:
        """Send a notification that the model got, apart from messages of the user and results of calls."""
        self.queue_update(
            schema.AgentThoughtChunk(
                session_update="agent_thought_chunk",
                content=text_block(editor_call_format.escape_control_characters(words)),
            )
        )

    def replay_user_text(self, words: str) -> None:
        """Send an earlier message of the user, when a session is replayed."""
        self.queue_update(
            schema.UserMessageChunk(
                session_update="user_message_chunk",
                content=text_block(editor_call_format.escape_control_characters(words)),
            )
        )

    def replay_user_image(self, picture: UserPicture) -> None:
        """Send an image of an earlier message of the user."""
        content = schema.ImageContentBlock(type="image", data=picture.base64, mime_type=picture.media_type)
        self.queue_update(schema.UserMessageChunk(session_update="user_message_chunk", content=content))

    def resolve_tool_id(self, name: str) -> str:
        """Return a tool's ID by any of its names, or the name itself for an unknown tool."""
        return name if (spec := self._spec_of(name)) is None else spec.id

    def has_tool(self, name: str) -> bool:
        return self._spec_of(name) is not None

    def show_subagent_approval_request(self, request: ApprovalRequest) -> None:
        """Show a sub-agent's call that requires approval, if the client does not know it yet."""
        if request.call_id not in self._known_calls:
            by = request.origin.partition(" of ")[0]
            self.show_new_call(request.call_id, request.tool_id, request.arguments, by=by)
            if by:
                self._subagent_calls[request.call_id] = request.tool_id

    def show_subagent_approval_decision(self, request: ApprovalRequest, approved: bool) -> None:
        """Show the decision about a sub-agent's call.

        No event reports the end of such a call, so it is shown as running until the prompt is answered.
        """
        if request.call_id in self._subagent_calls:
            self._update_call(request.call_id, request.tool_id, status="in_progress" if approved else "failed")
            if not approved:
                del self._subagent_calls[request.call_id]

    def show_subagent_calls_completed(self) -> None:
        """Show all calls of sub-agents as completed, because the prompt is answered."""
        for call_id, tool_id in self._subagent_calls.items():
            self._update_call(call_id, tool_id, status="completed")
        self._subagent_calls.clear()

    # ── calls ────────────────────────────────────────────────────────────────────────────────────

    def show_call_event(self, event: Event) -> None:
        """Show an event of a call. Its result is shown by :meth:`answered`."""
        if not (call_id := event.call_id):
            return
        match event.kind:
            case "proposed":
                given: Any = event.data.get("arguments")
                self.show_new_call(
                    call_id, event.tool_id, cast("dict[str, Any]", given) if isinstance(given, dict) else {}
                )
            case "started":
                self._on_started(call_id, event.tool_id)
            case "progress":
                self._on_progress(call_id, event)
            case "awaiting-approval":
                self._awaiting_approval.add(call_id)
            case "backgrounded":
                self._jobs[call_id] = False
            case "finished":
                self._on_finished(call_id, event)
            case _:
                pass

    def _on_finished(self, call_id: str, event: Event) -> None:
        ended = "completed" if event.data.get("type") == "output" else "failed"
        if call_id in self._awaiting_approval:  # the call has no outcome yet
            self._awaiting_approval.discard(call_id)
        else:
            self._update_call(call_id, event.tool_id, status=ended)
        if (answered := self._jobs.pop(call_id, None)) is None:
            return
        if not answered:
            self._finished_jobs.add(call_id)
        if (screen := self._terminals.end(call_id)) is not None:
            run = editor_call_format.parse_program_run(event.data)
            unknown = 0 if ended == "completed" else 1
            screen.show_command_end(
                unknown if run.exit_code is None and run.signal_name is None else run.exit_code, run.signal_name
            )
            if screen.content is None and not screen.has_shown_output:
                self._update_call(
                    call_id, event.tool_id, content=[editor_call_format.make_text_content(editor_call_format.NO_OUTPUT)]
                )

    def show_new_call(self, call_id: str, tool_id: str, arguments: Mapping[str, Any], *, by: str = "") -> None:
        """Show a new call.

        :param by: the sub-agent that makes the call; empty for the agent itself
        """
        spec = self._spec_of(tool_id)
        self._known_calls.add(call_id)
        self.queue_update(
            schema.ToolCallStart(
                session_update="tool_call",
                tool_call_id=call_id,
                title=editor_call_format.make_call_title(tool_id, arguments, by),
                kind=spec.kind if spec is not None else "other",
                status="pending",
                locations=editor_call_format.extract_call_file_locations(spec, arguments, self._workdir),
                raw_input=dict(arguments),
            )
        )

    def show_call_answer(self, answer: CallAnswer) -> None:
        """Show the answer of a call, in the form for the user."""
        result = answer.result
        if answer.call_id in self._finished_jobs:  # everything was shown, except that the call became a job
            self._finished_jobs.discard(answer.call_id)
            self._update_call(answer.call_id, answer.tool_id, raw_output=result.to_dict())
            return
        if answer.call_id in self._jobs and result.ok:
            self._jobs[answer.call_id] = True
            screen = self._terminals.get(answer.call_id)
            update = (
                None
                if screen is not None and (screen.has_shown_output or screen.content)
                else editor_call_format.make_result_content(result, "")[0]
            )
            self._update_call(
                answer.call_id, answer.tool_id, status="in_progress", content=update, raw_output=result.to_dict()
            )
            return
        approval_id = result.metadata.get("awaiting_approval")
        self.show_call_result(answer.call_id, answer.tool_id, result, "pending" if approval_id else None)
        data: object = result.data
        if answer.tool_id == "todo" and result.ok and isinstance(data, dict):
            plan = editor_call_format.make_plan_update(cast("dict[str, Any]", data).get("todos"))
            if plan is not None:
                self.queue_update(plan)

    def show_call_result(
        self, call_id: str, tool_id: str, result: Result, status: schema.ToolCallStatus | None = None
    ) -> None:
        content, places = editor_call_format.make_result_content(result, self._workdir)
        if (screen := self._terminals.end(call_id)) is not None:
            content = self._show_final_output(screen, result) or content
        self._update_call(
            call_id,
            tool_id,
            status=status or ("completed" if result.ok else "failed"),
            content=content,
            locations=places or None,
            raw_output=result.to_dict(),
        )

    def _on_started(self, call_id: str, tool_id: str) -> None:
        if (spec := self._spec_of(tool_id)) is None or spec.kind != "execute":
            self._update_call(call_id, tool_id, status="in_progress")
            return

        def tell(content: list[editor_call_format.Content] | None, meta: Any) -> None:
            if len(self._waiting) <= MAX_QUEUED_PROGRESS:
                last = self._waiting[-1] if self._waiting else None
                if (
                    content
                    and meta is None
                    and isinstance(last, schema.ToolCallProgress)
                    and _is_progress_only(last, call_id)
                ):
                    self._waiting.pop()
                self._update_call(call_id, tool_id, content=content, field_meta=meta)

        screen = self._terminals.open_command_terminal(call_id, tell)
        meta = {"terminal_info": {"terminal_id": call_id, "cwd": self._workdir}} if screen.mode == "drawn" else None
        self._update_call(call_id, tool_id, status="in_progress", content=screen.content, field_meta=meta)

    def _show_final_output(self, screen: CommandTerminal, result: Result) -> list[editor_call_format.Content] | None:
        """Show the rest of a command's output and its exit, and return the content of its terminal.

        Return None if the result itself has all content: without a terminal, or for a call that is not a program.
        """
        run = editor_call_format.parse_program_run(result.data)
        if screen.mode != "text" and not screen.has_shown_output and run.output is not None:
            screen.append_terminal_output(run.output)
        screen.show_command_end(run.exit_code, run.signal_name)
        if screen.content is None or (run.output is None and not screen.has_shown_output and result.ok):
            return None
        failed = (
            []
            if result.ok
            else [editor_call_format.make_text_content(result.error_text or "The call failed without a message.")]
        )
        return [*screen.content, *failed, *run.notes]

    def _update_call(self, call_id: str, tool_id: str, **fields: Any) -> None:
        if call_id not in self._known_calls:  # the call was proposed before this client connected
            self.show_new_call(call_id, tool_id, {})
        self.queue_update(schema.ToolCallProgress(session_update="tool_call_update", tool_call_id=call_id, **fields))

    def _on_progress(self, call_id: str, event: Event) -> None:
        piece = event.data.get("output")
        if isinstance(piece, str) and (screen := self._terminals.get(call_id)) is not None:
            screen.append_terminal_output(piece)
            return
        message = event.data.get("message")
        if not isinstance(message, str) or not message or len(self._waiting) > MAX_QUEUED_PROGRESS:
            return
        last = self._waiting[-1] if self._waiting else None
        if isinstance(last, schema.ToolCallProgress) and _is_progress_only(last, call_id):
            self._waiting.pop()
        self._update_call(call_id, event.tool_id, content=[editor_call_format.make_text_content(message)])


def _is_progress_only(update: schema.ToolCallProgress, call_id: str) -> bool:
    """Return whether an update contains only progress of this call, so that a later one can replace it."""
    return update.tool_call_id == call_id and update.status is None and update.field_meta is None


def text_block(words: str) -> schema.TextContentBlock:
    return schema.TextContentBlock(type="text", text=words)
