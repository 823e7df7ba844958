"""Requests of a running tool to the client: authorised and bounded on their way out, validated on their way back."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Any, cast

import orjson

from handrail.arbiter.call_state import Call
from handrail.arbiter.output.json_conversion import JsonConversion, ValueTooLarge
from handrail.contract.errors import ToolError
from handrail.contract.schema.argument_validation import InvalidSchemaError, ParametersSchema, compile_schema
from handrail.contract.services.client_services import (
    METHOD_CAPABILITIES,
    ClientHandler,
    ClientMethod,
    LogLevel,
    RequestToClient,
    UnsupportedClientRequest,
)

MAX_REQUESTS_AT_ONCE = 16
"""Requests in one batch."""
MAX_REQUESTS_PER_CALL = 256
"""Requests of one call and its nested calls."""
MAX_REQUEST_BYTES = 8 * 1024 * 1024
"""Bytes of JSON in one batch."""
MAX_ANSWER_BYTES = 16 * 1024 * 1024
MAX_ANSWER_DEPTH = 64
MAX_ROOTS = 10_000
MAX_PROGRESS_CHARACTERS = 10_000
"""Characters of a progress message."""
MAX_LOG_DATA_BYTES = 65_536
"""Bytes and parts of logged data."""
_MAX_PARTS = 2_000_000
_MAX_KEY = 200


class CallClientService:
    """The client of one call (:class:`~handrail.contract.services.client_services.ClientService`).

    :param require: raises unless the tool has the named capability
    """

    __slots__ = ("_call", "_require")

    def __init__(self, call: Call, require: Callable[[str], None]) -> None:
        self._call = call
        self._require = require

    def supports(self, method: ClientMethod, params: Mapping[str, Any] | None = None) -> bool:
        if (client := self._call.lane.environment.client) is None or method not in METHOD_CAPABILITIES:
            return False
        try:
            self._require(METHOD_CAPABILITIES[method])
            return client.supports(find_root_call(self._call).id, method, params or {}) is True
        except Exception:  # without the capability, or with a frontend that cannot tell
            return False

    def detach(self) -> None:
        call = self._call
        if (client := call.lane.environment.client) is not None and not call.tool_ended:
            post_to_kernel_loop(call, partial(client.detach, find_root_call(call).id))

    async def send_requests(self, requests: Mapping[str, RequestToClient]) -> Mapping[str, Mapping[str, Any]]:
        home = self._call.execution.loop
        if asyncio.get_running_loop() is home:
            return await self._send_requests(requests)
        # The thread of a tool, which has a separate loop.
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._send_requests(requests), home))

    async def _send_requests(self, requests: Mapping[str, RequestToClient]) -> Mapping[str, Mapping[str, Any]]:
        call = self._call
        sent_requests = self._validate_and_redact_requests(requests)
        client, root = call.lane.environment.client, find_root_call(call)
        if client is None:
            raise ToolError(
                f"No client of this session supports {_name_methods(sent_requests)}. Continue without it.",
                kind="unavailable",
            )
        for ask in sent_requests.values():
            try:
                self._check_supported(client, root.id, ask)
            except UnsupportedClientRequest as error:
                root.unsupported_requests = root.unsupported_requests.union(error.methods)
                raise
        schemas = {key: _form_schema(key, ask) for key, ask in sent_requests.items()}
        if call.tool_ended or call.execution.reason is not None:
            raise ToolError(
                f"`{call.tool_id}` has ended, so its request was not sent. Send requests while the call runs.",
                kind="cancelled",
            )
        root.client_request_count += len(sent_requests)
        if root.client_request_count > MAX_REQUESTS_PER_CALL:
            raise ToolError(
                f"The call sent too many requests to the client. The limit is {MAX_REQUESTS_PER_CALL}. Continue without it.",
                kind="limit",
            )
        items = [{"method": ask.method, "origin": ask.origin} for ask in sent_requests.values()]
        call.queue_log_record("client-request", {"asks": items})
        call.submit_queued_records()
        with pause_timeouts(call):
            try:
                answers = cast("object", await client.send_requests(root.id, sent_requests))
            except (ToolError, asyncio.CancelledError):
                raise
            except Exception as error:
                message = f"{type(error).__name__}: {call.redactor.redact_text_head(str(error), 300)}"
                raise ToolError(
                    f"The request to the client failed: {message}. Continue without it.", kind="unavailable"
                ) from None
        return _check_answers(answers, sent_requests, schemas)

    def _validate_and_redact_requests(self, requests: object) -> dict[str, RequestToClient]:
        """Return the requests as they are sent: validated, within limits, redacted and with their origin.

        :raises ToolError: for an invalid or forbidden request
        """
        call = self._call
        if (
            not isinstance(requests, Mapping)
            or not 0 < len(cast("Mapping[Any, Any]", requests)) <= MAX_REQUESTS_AT_ONCE
        ):
            raise ToolError(
                f"Invalid requests to the client. Expected a mapping of 1 to {MAX_REQUESTS_AT_ONCE} requests by key.",
                kind="invalid_input",
            )
        assert call.entry is not None
        foreign = call.entry.third_party
        found: dict[str, RequestToClient] = {}
        size = 0
        for key, ask in cast("Mapping[object, object]", requests).items():
            if not isinstance(key, str) or not 0 < len(key) <= _MAX_KEY or not key.isprintable():
                raise ToolError(
                    f"Invalid key of a request: {str(key)[:80]!r}. Expected 1 to {_MAX_KEY} printable characters.",
                    kind="invalid_input",
                )
            if not isinstance(ask, RequestToClient) or ask.method not in METHOD_CAPABILITIES:
                raise ToolError(
                    f"Request {key!r} has an unknown method. Expected one of: {', '.join(METHOD_CAPABILITIES)}.",
                    kind="invalid_input",
                )
            self._require(METHOD_CAPABILITIES[ask.method])
            params: Any = None
            try:
                params = JsonConversion(dict(ask.params), _MAX_PARTS).data
                size += len(orjson.dumps(params))
            except (ValueTooLarge, TypeError, ValueError):
                size = MAX_REQUEST_BYTES + 1
            if size > MAX_REQUEST_BYTES:
                raise ToolError(
                    f"The requests to the client are too large. The limit is {MAX_REQUEST_BYTES:,} bytes. Send shorter requests.",
                    kind="limit",
                )
            if call.redactor.active:
                params = call.redactor.redact_json(params)
            found[key] = RequestToClient(ask.method, params, foreign.name if foreign is not None else ask.origin)
        return found

    @staticmethod
    def _check_supported(client: ClientHandler, call_id: str, ask: RequestToClient) -> None:
        try:
            offered = client.supports(call_id, ask.method, ask.params) is True
        except Exception:
            offered = False
        if not offered:
            raise UnsupportedClientRequest(ask.method)


def find_root_call(call: Call) -> Call:
    """Return the outermost calling call, which the client made."""
    while call.parent is not None:
        call = call.parent
    return call


@contextlib.contextmanager
def pause_timeouts(call: Call) -> Generator[None]:
    """Pause the time-outs of the call and its calling calls while it waits for something outside."""
    waiting = [call.execution]
    above = call.parent
    while above is not None:
        waiting.append(above.execution)
        above = above.parent
    for execution in waiting:
        execution.pause_timeout()
    try:
        yield
    finally:
        for execution in waiting:
            execution.resume_timeout()


def post_to_kernel_loop(call: Call, tell: Callable[[], object]) -> None:
    """Call ``tell`` on the kernel's event loop, also from the thread of a tool."""
    home = call.execution.loop
    try:
        here = asyncio.get_running_loop() is home
    except RuntimeError:
        here = False
    if here:
        tell()
    else:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so there are no listeners
            home.call_soon_threadsafe(tell)


def make_progress_event_data(
    message: str, fraction: float | None, done: float | None, total: float | None
) -> dict[str, Any]:
    """Return the data of a progress event, without figures that are not finite numbers."""
    fields: dict[str, Any] = {"message": str(message)[:MAX_PROGRESS_CHARACTERS], "fraction": _finite_number(fraction)}
    if done is not None:
        fields["done"], fields["total"] = have, of = _finite_number(done), _finite_number(total)
        if fraction is None and have is not None and of is not None and of > 0:
            fields["fraction"] = min(max(have / of, 0.0), 1.0)
    return fields


def _finite_number(value: object) -> float | int | None:
    return value if isinstance(value, (int, float)) and abs(value) < math.inf else None


def make_log_event_data(level: LogLevel, data: object, logger: str | None) -> dict[str, Any]:
    """Return the data of a log event, as plain JSON and within limits."""
    try:
        plain = JsonConversion(data, MAX_LOG_DATA_BYTES).data
        is_small_enough = len(orjson.dumps(plain)) <= MAX_LOG_DATA_BYTES
    except (ValueTooLarge, MemoryError, TypeError, ValueError):
        plain, is_small_enough = None, False
    if not is_small_enough:
        plain = f"(message omitted: it has more than {MAX_LOG_DATA_BYTES:,} bytes)"
    return {"level": level, "data": plain, "logger": None if logger is None else str(logger)[:_MAX_KEY]}


# Validation of the client's answers.


def _name_methods(sent_requests: Mapping[str, RequestToClient]) -> str:
    return " or ".join(dict.fromkeys(ask.method for ask in sent_requests.values()))


def _form_schema(key: str, ask: RequestToClient) -> ParametersSchema | None:
    """Return the schema for the content of a form; None for other requests.

    :raises ToolError: for an invalid form
    """
    if ask.method != "elicitation/create":
        return None
    if not isinstance(ask.params.get("message"), str):
        raise ToolError(
            f"Request {key!r} has no `message`. Expected a string for the user. Add it to `params`.",
            kind="invalid_input",
        )
    if ask.params.get("mode") == "url":
        if not isinstance(ask.params.get("url"), str) or not ask.params["url"].startswith(("https://", "http://")):
            raise ToolError(
                f"Request {key!r} has an invalid `url`. Expected an address that begins with https://.",
                kind="invalid_input",
            )
        return None
    wanted = ask.params.get("requestedSchema")
    if not isinstance(wanted, Mapping):
        raise ToolError(
            f"Request {key!r} has no `requestedSchema`. Expected a JSON schema of the form. Add it to `params`.",
            kind="invalid_input",
        )
    try:
        return compile_schema(dict(cast("Mapping[str, Any]", wanted)))
    except InvalidSchemaError as error:
        raise ToolError(
            f"Request {key!r} has an invalid `requestedSchema`: {error}. Correct the schema.", kind="invalid_input"
        ) from None


def _check_answers(
    answers: object, sent_requests: Mapping[str, RequestToClient], schemas: Mapping[str, ParametersSchema | None]
) -> Mapping[str, Mapping[str, Any]]:
    """Return the validated answers of the client.

    :raises ToolError: ``backend``
    """
    if not isinstance(answers, Mapping) or set(cast("Mapping[Any, Any]", answers)) != set(sent_requests):
        raise _invalid_answer(f"expected answers to exactly {', '.join(sent_requests)[:200]}")
    try:
        given = cast("Mapping[str, Any]", answers)
        plain = JsonConversion({key: given[key] for key in sent_requests}, _MAX_PARTS + MAX_ANSWER_BYTES)
        encoded = orjson.dumps(plain.data)
    except (ValueTooLarge, TypeError, ValueError):
        raise _invalid_answer("the answer is too large") from None
    if len(encoded) > MAX_ANSWER_BYTES:
        raise _invalid_answer(f"the answer has {len(encoded):,} bytes, and the limit is {MAX_ANSWER_BYTES:,}")
    if plain.notes:
        raise _invalid_answer(f"the answer is not JSON: {plain.notes[0][:200]}")
    if _is_deeper(plain.data, MAX_ANSWER_DEPTH):
        raise _invalid_answer(f"the answer is nested deeper than {MAX_ANSWER_DEPTH} levels")
    for key, ask in sent_requests.items():
        if (problem := _find_fault(ask, plain.data[key], schemas[key])) is not None:
            raise _invalid_answer(f"{ask.method}: {problem}")
    return plain.data


def _invalid_answer(what: str) -> ToolError:
    return ToolError(f"The client returned an invalid answer ({what}). Continue without it.", kind="backend")


def _is_deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [
            inner
            for one in layer
            if isinstance(one, (dict, list))
            for inner in (cast("dict[str, Any]", one).values() if isinstance(one, dict) else cast("list[Any]", one))
        ]
        if not layer:
            return False
    return True


def _find_fault(ask: RequestToClient, answer: Any, form: ParametersSchema | None) -> str | None:
    if not isinstance(answer, dict):
        return "expected an object"
    fields = cast("dict[str, Any]", answer)
    if ask.method == "elicitation/create":
        return _elicitation_fault(fields, form)
    if ask.method == "sampling/createMessage":
        return _sampling_fault(fields)
    roots = fields.get("roots")
    if not isinstance(roots, list) or len(cast("list[Any]", roots)) > MAX_ROOTS:
        return f"expected a list of at most {MAX_ROOTS:,} roots"
    for root in cast("list[Any]", roots):
        if not isinstance(root, dict):
            return "a root is not an object"
        uri, name = cast("dict[str, Any]", root).get("uri"), cast("dict[str, Any]", root).get("name")
        if not isinstance(uri, str) or not uri.startswith("file://"):
            return "the uri of a root does not begin with file://"
        if name is not None and not isinstance(name, str):
            return "the name of a root is not a string"
    return None


def _elicitation_fault(fields: dict[str, Any], form: ParametersSchema | None) -> str | None:
    action, content = fields.get("action"), fields.get("content")
    if action not in ("accept", "decline", "cancel"):
        return "the action is not accept, decline or cancel"
    if action != "accept" or form is None:
        return None
    given: dict[str, Any] = {} if content is None else content
    if not isinstance(given, dict):  # pyright: ignore[reportUnnecessaryIsInstance] - a client may say anything
        return "the content is not an object"
    for name, value in given.items():
        if isinstance(value, dict) or (
            isinstance(value, list) and not all(isinstance(one, str) for one in cast("list[Any]", value))
        ):
            return f"the field {name[:80]!r} is not a string, number, boolean or list of strings"
    problems = form.list_problems(given)
    return None if not problems else "; ".join(problems)[:500]


def _sampling_fault(fields: dict[str, Any]) -> str | None:
    if fields.get("role") not in ("user", "assistant"):
        return "the role is not user or assistant"
    if not isinstance(fields.get("model"), str):
        return "the model is missing"
    content: Any = fields.get("content")
    blocks: list[Any] = cast("list[Any]", content) if isinstance(content, list) else [content]
    for block in blocks:
        if not isinstance(block, dict):
            return "the content is neither a block nor a list of blocks"
        kind = cast("dict[str, Any]", block).get("type")
        wanted = {"text": "text", "image": "data", "audio": "data", "tool_use": "name"}.get(str(kind))
        if kind not in ("text", "image", "audio", "tool_use", "tool_result"):
            return f"a block has the type {str(kind)[:40]!r}; expected text, image, audio or tool_use"
        if wanted is not None and not isinstance(cast("dict[str, Any]", block).get(wanted), str):
            return f"a block of type {kind} has no {wanted}"
    return None
