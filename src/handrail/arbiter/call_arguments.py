"""The arguments of a call, as it runs with them and as the log stores them. Bounded checks and idempotency keys."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import orjson

from handrail.arbiter.call_state import Call
from handrail.arbiter.output.audience_views import make_audience_results
from handrail.arbiter.output.secret_redaction import SecretRedactor
from handrail.arbiter.output.shaper import OutputShaper
from handrail.contract.calls_and_results import CallAnswer, ProposedCall, Result
from handrail.contract.schema.argument_repair import ALL_ARGUMENTS
from handrail.contract.schema.argument_validation import ArgumentCheckBudgetError
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.text.strict_json import (
    MAX_ARGUMENT_BYTES,
    InvalidJsonTextError,
    find_arguments_size_fault,
    get_json_type_name,
    parse_arguments_with_note,
    try_parse_model_json_fast,
)
from handrail.contract.tool_generation import ToolEntry
from handrail.origins.bounded_program import encode_input, make_argv, parse_json_lines, run_bounded_program
from handrail.origins.program_lookup import (
    ProgramRefused,
    find_enclosing_folder,
    find_own_interpreter,
    list_open_workspaces,
)
from handrail.record.commit_log import CommitLog
from handrail.record.log_reader import LoggedRecord
from handrail.store.json_fallback_encoding import decode_json_with_fallback, encode_json_with_fallback

_MAX_LOOKED_AT = 64 * 1024
"""Bytes of unparsed arguments that are read as text."""
MAX_DIGIT_RUN = 20_000
"""Characters that arguments may write as numeric HTML references. The search for secrets takes 0.5 µs for each, on the loop.
"""
_MAX_HEAD = 2_000
"""Characters that are kept of text that is not JSON."""


def parse_proposed_arguments(
    proposed: ProposedCall,
) -> tuple[dict[str, Any] | None, bytes | None, str, dict[str, str]]:
    """Return the proposed arguments as an object, their compact JSON if known, and the fault if there is no object.

    The last value is what was read differently from how it was sent, by path.
    """
    given: Any = proposed.arguments
    if proposed.problem is not None:
        return None, None, proposed.problem, {}
    if isinstance(given, (str, bytes)):
        if (quick := try_parse_model_json_fast(given)) is not None:
            return *quick, "", {}
        try:
            arguments, note = parse_arguments_with_note(given)
        except InvalidJsonTextError as error:
            return None, None, str(error), {}
        return arguments, None, "", {ALL_ARGUMENTS: note} if note else {}
    if isinstance(given, Mapping):
        sent = cast("Mapping[str, Any]", given)
        if fault := find_arguments_size_fault(sent):
            return None, None, fault, {}
        return (sent if isinstance(sent, dict) else dict(sent)), None, "", {}
    kind = get_json_type_name(given)
    return None, None, f"The arguments are a JSON {kind}. Expected an object. Send an object.", {}


def redact_rejected_arguments(given: Any, redactor: SecretRedactor) -> Any:
    """Return arguments that no tool receives, in the form for the record.

    Text is cut to its head. Of an oversized value only the kind is recorded.
    """
    if isinstance(given, (str, bytes)):
        text = given if isinstance(given, str) else given[:_MAX_LOOKED_AT].decode("utf-8", "replace")
        return {"unparsed": redactor.redact_text_head(text, _MAX_HEAD)}
    if isinstance(given, (Mapping, list, tuple)) and find_arguments_size_fault(cast("Mapping[str, Any]", given)):
        return {"$oversized": get_json_type_name(cast("object", given))}
    return given  # pyright: ignore[reportUnknownVariableType] - any value can be recorded


def redact_arguments_for_record(
    arguments: Any, compact: bytes | None, redactor: SecretRedactor
) -> tuple[Any, str | None]:
    """Return the arguments in the form for the record, as JSON if they need no change, and what is wrong if they are too large.

    They are redacted, and a tool that changes its arguments does not change them.

    :param compact: their JSON, if known
    """
    plain = True
    if compact is None:
        try:
            compact = orjson.dumps(arguments)
        except TypeError:  # half surrogate pairs, huge integers, depth, cycles: the log stores a substitute
            compact, plain = encode_json_with_fallback(arguments, max_bytes=2**62), False
    if len(compact) > MAX_ARGUMENT_BYTES:
        size = f"{len(compact):,} bytes of JSON. The limit is {MAX_ARGUMENT_BYTES:,}"
        return {"$oversized": len(compact)}, f"The arguments are {size}. Pass the path of a file instead."
    if redactor.active and (numbered := compact.count(b"&#")) > MAX_DIGIT_RUN:
        count = f"{numbered:,} numeric HTML references (&#…;). The limit is {MAX_DIGIT_RUN:,}"
        return {"$oversized": len(compact)}, f"The arguments contain {count}. Send the characters themselves."
    if not plain:
        arguments = decode_json_with_fallback(compact)
    if redactor.active and not (plain and not redactor.contains_secret(compact)):
        return redactor.redact_json(arguments), None
    return (bytes(compact) if plain else arguments), None


# Argument checks that exceed the event loop's budget, each in a process with limited time and memory.
#
# The estimate of :mod:`handrail.contract.schema.schema_check_cost` is an upper bound. Many real schemas cost far less than their
# estimate, and only the check itself can show it. A separate process, which the system ends at a limit, can make the check
# without blocking the kernel.

_TIMEOUT_S = 20.0
"""Wall time. The limit of processor time comes first, except on a busy machine."""
_AT_ONCE = 2
_MOST_WAITING = 32
_MAX_ANSWER = 16 * 1024 * 1024
_MODULE = "handrail.contract.schema.schema_check_program"
_CPU_S, _MEMORY_MIB = 2, 512
_BOUNDS = f"the check did not finish within {_CPU_S} s and {_MEMORY_MIB} MiB"
_TOO_LARGE = "the arguments do not match the schema, which is too large to report details; compare them with the schema"


class ArgumentCheckRunner:
    """A runner of argument checks, with a separate process for each. Use it on one event loop."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._there = 0

    async def check_arguments_in_subprocess(
        self, entry: ToolEntry, unfinished: ArgumentCheckBudgetError, *, shared: bool
    ) -> dict[str, Any]:
        """Return what :meth:`ToolEntry.validate_arguments` returns, after a check in a separate process.

        :param shared: the caller still holds the arguments object, so it is copied
        :raises ToolError: as :meth:`ToolEntry.validate_arguments`; :class:`ArgumentCheckBudgetError` if the process did not finish the check
        """
        arguments = copy.deepcopy(unfinished.arguments) if shared else unfinished.arguments
        problems = await self._find_problems(unfinished, arguments)
        return entry.validate_arguments(arguments, parsed=True, known_problems={unfinished.schema: problems})

    async def _find_problems(self, unfinished: ArgumentCheckBudgetError, arguments: dict[str, Any]) -> list[str]:
        coarse = unfinished.problems
        if self._there >= _MOST_WAITING:
            return coarse
        self._there += 1
        try:
            async with self._slots:
                lines = await _run_check_process({"parameters": unfinished.schema.parameters, "arguments": arguments})
        finally:
            self._there -= 1
        if lines is None:
            return coarse
        if not lines or isinstance(lines[0], dict):  # the process had no time or memory to compute an answer
            return [*coarse, _BOUNDS]
        if lines[0] is True:
            return []
        if len(lines) == 1:
            return coarse if coarse.checked else [_TOO_LARGE]
        return cast("list[str]", lines[1])


async def _run_check_process(question: object) -> list[object] | None:
    """Return the complete lines that the process printed; None if it cannot be started."""
    output = bytearray()
    try:
        data = encode_input(question)
        argv = make_argv(find_own_interpreter(), _MODULE, _CPU_S, _MEMORY_MIB, _import_path())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                await run_bounded_program(argv, data, output, max_bytes=_MAX_ANSWER)
    except (ProgramRefused, OSError, ValueError, TypeError, RecursionError):
        return None
    return parse_json_lines(output)


def _import_path() -> list[str]:
    """Return the import path for the process, without open workspaces, where a call could have written."""
    folders = list_open_workspaces()
    wanted = dict.fromkeys((str(Path(__file__).parents[2]), *sys.path))
    return [one for one in wanted if one.startswith("/") and find_enclosing_folder(one, folders) is None]


# Idempotency keys: a call that is proposed again under the same durable key gets the recorded answer and does not run
# twice.

_MAY_PASS = frozenset({"unavailable", "cancelled", "timeout"})
"""Kinds of refusals whose cause may have passed: a full disk, a stop, a lock time-out."""


def parse_recorded_result(outcome: LoggedRecord) -> Result | None:
    """Return the result in the record that ended a call; None if it was removed or is damaged."""
    wire: Any = (outcome.body or {}).get("result")
    if not isinstance(wire, Mapping):
        return None
    fields = cast("Mapping[str, Any]", wire)
    sound = (
        fields.get("type") in ("output", "error")
        and isinstance(fields.get("error_text") or "", str)
        and isinstance(fields.get("metadata", {}), Mapping)
    )
    return Result.from_dict(fields) if sound else None


class IdempotencyKeyLookup:
    """A lookup of recorded answers by idempotency key."""

    def __init__(self, log: CommitLog, shaper: OutputShaper) -> None:
        self._log = log
        self._shaper = shaper

    async def find_recorded_answer(self, call: Call) -> CallAnswer | None:
        """Return the recorded answer of an earlier call with the same key; None if there is none."""
        before = await self._log.find_proposal(call.id)
        outcome = await self._log.find_move_to_background(call.id) or await self._log.find_outcome(call.id)
        if before is None or outcome is None:
            return None  # never proposed, or proposed and not started
        body = outcome.body
        if before.body is not None and before.body.get("key_hash") != self.key_hash(call):
            kind, text = "conflict", "was used before with another tool or other arguments. Use a new key."
        elif outcome.kind == "interrupted":
            kind, text = (
                "interrupted",
                "belongs to a call that was interrupted with an unknown outcome and is not run again. Check its effect, then "
                "use a new key.",
            )
        elif body is None:
            kind, text = ("unavailable", "belongs to a call whose result was removed from the log. Use a new key.")
        elif (recorded := parse_recorded_result(outcome)) is None:
            kind, text = (
                "unavailable",
                "belongs to a call whose recorded result is damaged; it is not run again. Check its effect, then use a new key.",
            )
        elif outcome.kind == "rejected" and recorded.error_kind in _MAY_PASS:
            return None  # nothing was run, and the cause may have passed
        else:
            result = recorded.with_metadata(replayed=True)
            entry = call.generation.resolve_tool_name(
                before.tool or call.proposed.name
            )  # of a step: the tool that was open
            at_face, model = (result, result) if entry is None else make_audience_results(entry.spec, result)
            return CallAnswer(call.id, call.proposed.name, at_face, model)
        result = call.make_error_result(kind, f"The idempotency key `{escape_terminal_controls(call.id)}` {text}")
        return CallAnswer(call.id, call.proposed.name, result, result)

    def key_hash(self, call: Call) -> str:
        proposed = call.proposed
        entry = call.generation.resolve_tool_name(proposed.name)
        return self._shaper.hash_canonical_json([entry.spec.id if entry else proposed.name, proposed.arguments])
