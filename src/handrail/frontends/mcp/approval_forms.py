"""Approvals and questions as forms for a client's user, and the answers read from them.

Everything is shown in full, with hiding or reordering characters written out: a user cannot approve unseen text.

Source: https://modelcontextprotocol.io/specification/2025-11-25/client/elicitation
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from handrail.contract.approval_requests import ApprovalAnswer, ApprovalChoice, ApprovalRequest
from handrail.contract.services.client_services import RequestToClient
from handrail.contract.services.tool_runtime import UserQuestion
from handrail.frontends.cli.terminal_approvals import format_approval_request_lines
from handrail.frontends.cli.terminal_output import escape_invisible_characters, escape_to_one_line

TITLED_SINCE = "2025-11-25"
"""The first protocol version in which options have titles and several can be chosen."""
DECISION = "decision"


def make_approval_form(request: ApprovalRequest, changes: str | None, version: str) -> RequestToClient:
    """Return the form that asks the user for approval of a call.

    It has one field, because some clients cannot leave an optional one empty. Some show only the first lines of the message
    and the first words of an option, so both begin with what the user decides about.

    :param changes: the changes of the call to a file, as a diff
    :param version: the client's protocol version
    """
    choices = _approval_choices(request)
    decision = _choice_field("Your decision", "", choices, version)
    first, *further = format_approval_request_lines(request, changes)
    if (rule := request.suggested_rule or request.suggested_wider_rule) is not None:
        first += f"\n  rule that “Session” and “Always” store: {escape_to_one_line(rule)}"
    further.append(f"  Other answers: handrail approve {request.id}")
    return _make_form("\n".join((first, *further)), {DECISION: decision}, (DECISION,))


def _approval_choices(request: ApprovalRequest) -> list[tuple[ApprovalChoice, str]]:
    """Return at most four choices. ``handrail approve`` offers all of them."""
    found: list[tuple[ApprovalChoice, str]] = [("once", "Once: only this call")]
    if (rule := request.suggested_rule or request.suggested_wider_rule) is not None:
        shown, wider = escape_to_one_line(rule), request.suggested_rule is None
        if not request.is_shared:
            found.append(("session-wider" if wider else "session", f"Session: {shown}"))
        found.append(("project-wider" if wider else "project", f"Always: {shown}"))
    return [*found, ("reject", "Reject")]


def parse_approval_form_answer(request: ApprovalRequest, filled: Mapping[str, Any]) -> ApprovalAnswer:
    """Return the user's answer in a form of :func:`make_approval_form`.

    A declined or dismissed form defers the request, so that it can still be answered elsewhere. Many clients decline without
    asking their user.
    """
    content: Any = filled.get("content")
    if filled.get("action") != "accept" or not isinstance(content, Mapping):
        return ApprovalAnswer("defer")
    given: Mapping[str, Any] = content  # pyright: ignore[reportUnknownVariableType]
    for choice, _ in _approval_choices(request):
        if given.get(DECISION) == choice:
            message = given.get("message")  # the form has no such field, and an answer may
            return ApprovalAnswer(choice, message[:10_000] if isinstance(message, str) else "")
    return ApprovalAnswer("defer")


_OWN_WORDS = "What you want to add to your choice, if anything."


def make_question_form(questions: Sequence[UserQuestion], version: str) -> RequestToClient:
    """Return one form for all questions, with a field for each, named ``q1``, ``q2`` and so on."""
    fields: dict[str, Any] = {}
    required: list[str] = []
    for number, question in enumerate(questions, 1):
        name = f"q{number}"
        title = escape_to_one_line(question.header) or f"Question {number}"
        labels = [(option.label, _option_text(option.label, option.description)) for option in question.options]
        text = escape_invisible_characters(question.question)
        if not labels:
            fields[name] = {"type": "string", "title": title, "description": text}
            required.append(name)
        elif not question.multi_select:
            fields[name] = _choice_field(title, text, labels, version)
            fields[f"{name}_text"] = {"type": "string", "title": f"{title}: your words", "description": _OWN_WORDS}
            required.append(name)
        elif version >= TITLED_SINCE:
            options = [{"const": label, "title": shown} for label, shown in labels]
            fields[name] = {"type": "array", "title": title, "description": text, "items": {"anyOf": options}}
            required.append(name)
        else:  # earlier versions have no lists, so each option is a check box
            for place, (_, shown) in enumerate(labels, 1):
                fields[f"{name}_{place}"] = {
                    "type": "boolean",
                    "title": f"{title}: {shown}",
                    "description": text,
                    "default": False,
                }
    shown = [escape_invisible_characters(question.question) for question in questions]
    return _make_form("\n".join(shown), fields, tuple(required))


def parse_question_form_answers(
    questions: Sequence[UserQuestion], filled: Mapping[str, Any], version: str
) -> list[list[str]] | str | None:
    """Return one list of answers per question, a text if the user declined, or None without an answer."""
    if filled.get("action") == "decline":
        return "The user declined to answer. Continue without the answer."
    content: Any = filled.get("content")
    if filled.get("action") != "accept" or not isinstance(content, Mapping):
        return None
    given: dict[str, Any] = dict(content)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    answers: list[list[str]] = []
    for number, question in enumerate(questions, 1):
        name = f"q{number}"
        if question.options and question.multi_select and version < TITLED_SINCE:
            options = enumerate(question.options, 1)
            answers.append([option.label for place, option in options if given.get(f"{name}_{place}") is True])
            continue
        value = given.get(name)
        several: list[Any] = value if isinstance(value, list) else [value]  # pyright: ignore[reportUnknownVariableType]
        if question.options and not question.multi_select and isinstance(words := given.get(f"{name}_text"), str):
            several = [*several, words.strip()[:10_000]] if words.strip() else several
        if not all(isinstance(one, str) for one in several):
            return None
        answers.append(list(several))
    return answers


def _option_text(label: str, description: str) -> str:
    return (
        f"{escape_to_one_line(label)}: {escape_to_one_line(description)}" if description else escape_to_one_line(label)
    )


def _choice_field(title: str, description: str, options: Sequence[tuple[str, str]], version: str) -> dict[str, Any]:
    field: dict[str, Any] = {"type": "string", "title": title}
    if description:
        field["description"] = description
    if version >= TITLED_SINCE:
        return {**field, "oneOf": [{"const": value, "title": shown} for value, shown in options]}
    return {**field, "enum": [value for value, _ in options], "enumNames": [shown for _, shown in options]}


def _make_form(message: str, fields: Mapping[str, Any], required: Sequence[str]) -> RequestToClient:
    schema = {"type": "object", "properties": dict(fields), "required": list(required)}
    return RequestToClient("elicitation/create", {"mode": "form", "message": message, "requestedSchema": schema})
