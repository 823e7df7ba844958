"""plan, plan_exit: into the mode plan and out of it, as the user decides."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from handrail.contract.errors import ToolError
from handrail.contract.permission_modes import Mode
from handrail.contract.services.tool_runtime import QuestionOption, Runtime, UserQuestion
from handrail.contract.tool.requires import Requires
from handrail.contract.tool.spec import ToolSpec
from handrail.contract.tool.tool_protocol import Tool
from handrail.tools.tool_declarations import make_closed_object_schema

_WEEK_MS = 7 * 24 * 60 * 60 * 1000
_MAX_PLAN = 100_000

_ENTER = "Enter plan mode"
_STAY = "Keep the current mode"
_ENTRY_QUESTION = UserQuestion(
    "The agent asks to plan first. In plan mode it only reads, until you answer its plan.",
    "Plan mode",
    (
        QuestionOption(_ENTER, "Calls that write or have external effects are denied"),
        QuestionOption(_STAY, "Type words for the agent in place of a choice"),
    ),
)


class PlanTool(Tool):
    session_modes = ("ask", "accept-edits", "auto")
    spec = ToolSpec(
        id="plan",
        description=(
            "Ask the user to switch this session to plan mode, in which you only read. Use it before work that needs a plan "
            "which the user should see. Call plan_exit with the complete plan when it is ready."
        ),
        parameters=make_closed_object_schema({}),
        requires=Requires(capabilities=("ask", "mode", "catalog")),
        side_effect="read",
        locks=(),
        timeout_ms=_WEEK_MS,
        category="system",
        kind="switch_mode",
        documentation=(
            "Returns `mode`, the mode of the session after the answer, `entered`, and the `reason` of the user if there is "
            "one.\n\n"
            "- Plan mode denies every call that writes or has external effects.\n"
            "- If no user is attached, the tool is unavailable, and the mode stays."
        ),
    )

    def questions(self, args: dict[str, Any]) -> Sequence[UserQuestion]:
        return (_ENTRY_QUESTION,)

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        label, words = await _ask(_ENTRY_QUESTION, runtime, "Plan mode was not entered")
        if label != _ENTER:
            return {"entered": False, **_reason(words), "next": "Continue without plan mode."}
        await runtime.mode.change("plan")
        with contextlib.suppress(ToolError):  # this agent may not have it, and the user can leave plan mode as well
            await runtime.catalog.load("plan_exit", kind="tool")
        return {
            "mode": "plan",
            "entered": True,
            **_reason(words),
            "next": "Only read from now on. Call plan_exit with the complete plan when it is ready.",
        }


_ASK = "Carry out, and ask before edits"
_ACCEPT = "Carry out, and accept edits"
_LEAVE = "Leave plan mode only"
_KEEP = "Keep planning"
_EXIT_OPTIONS = (
    QuestionOption(_ASK, "The plan is approved. Edits need your approval, as in the mode ask"),
    QuestionOption(_ACCEPT, "The plan is approved. Edits in the workspace run without approval"),
    QuestionOption(_LEAVE, "Return to the mode before plan mode. The plan is not approved"),
    QuestionOption(_KEEP, "The mode stays plan. Type words for the agent in place of a choice"),
)


class PlanExitTool(Tool):
    session_modes = ("plan",)
    spec = ToolSpec(
        id="plan_exit",
        description=(
            "Show your complete plan to the user, who decides whether you carry it out. Only in plan mode. Write the plan so "
            "that the user can judge it without this conversation."
        ),
        parameters=make_closed_object_schema(
            {
                "plan": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": _MAX_PLAN,
                    "description": "Complete plan, as Markdown. The user sees all of it",
                }
            },
            ["plan"],
        ),
        requires=Requires(capabilities=("ask", "mode")),
        side_effect="read",
        locks=(),
        timeout_ms=_WEEK_MS,
        category="system",
        kind="switch_mode",
        documentation=(
            "Returns `approved`, the `mode` of the session after the answer, and the `reason` of the user if there is one.\n\n"
            "- `approved` is true only if the user chose to carry out the plan.\n"
            "- Leaving plan mode does not approve the plan.\n"
            "- If the user wants to keep planning, the mode stays plan. Change the plan and call plan_exit again.\n"
            "- If no user is attached, the tool is unavailable, and the mode stays."
        ),
    )

    def check(self, args: dict[str, Any]) -> None:
        if not args["plan"].strip():
            raise ToolError("`plan` is empty. Pass the complete plan as text.", kind="invalid_input")

    def questions(self, args: dict[str, Any]) -> Sequence[UserQuestion]:
        return (UserQuestion(f"The agent has finished its plan:\n\n{args['plan']}", "Plan", _EXIT_OPTIONS),)

    async def execute(self, args: dict[str, Any], runtime: Runtime) -> object:
        label, words = await _ask(self.questions(args)[0], runtime, "The plan was not shown")
        if label in (_ASK, _ACCEPT):
            _, mode = await runtime.mode.change("ask" if label == _ASK else "accept-edits")
            return _exit_result(True, mode, words, "The user approved the plan. Carry it out.")
        if label == _LEAVE:
            _, mode = await runtime.mode.change(None)
            return _exit_result(False, mode, words, "The user did not approve the plan. Wait for instructions.")
        return _exit_result(False, "plan", words, "Change the plan and call plan_exit again.")


def _exit_result(approved: bool, mode: Mode, words: str, further: str) -> dict[str, Any]:
    return {"approved": approved, "mode": mode, **_reason(words), "next": further}


async def _ask(question: UserQuestion, runtime: Runtime, failure: str) -> tuple[str | None, str]:
    """Return the label that the user chose, or None, and the user's further words.

    :raises ToolError: ``unavailable`` if no user can answer
    """
    try:
        answers = await runtime.user.ask((question,))
    except ToolError as error:
        if error.kind != "unavailable":
            raise
        text = f"{failure}, and the mode stays: no user can answer now ({error.text}). Continue without it, or ask the user in your reply."
        raise ToolError(text, kind="unavailable") from None
    given = [one.strip() for answer in answers for one in answer]
    labels = [option.label for option in question.options if option.label in given]
    words = "\n".join(one for one in given if one and one not in labels)
    return (labels[0] if len(labels) == 1 else None), words


def _reason(words: str) -> dict[str, str]:
    return {"reason": words} if words else {}
