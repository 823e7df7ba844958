"""The JSON-RPC messages of a client: what a line or a body contains, and the errors for what cannot be served.

The SDKs assume messages of the right form. They drop others, so a client would wait forever. Here every request gets an
answer, and each message of a batch counts for itself.

Source: https://www.jsonrpc.org/specification
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import orjson

from handrail.contract.approval_requests import ApprovalAnswer
from handrail.contract.errors import ToolError
from handrail.contract.struct import Struct
from handrail.contract.text.strict_json import InvalidJsonTextError, parse_arguments

if TYPE_CHECKING:
    from handrail.contract.approval_requests import ApprovalRequest
    from handrail.contract.calls_and_results import CallAnswer
    from handrail.contract.services.client_services import ClientMethod, RequestToClient
    from handrail.contract.services.tool_runtime import UserQuestion
    from handrail.contract.session_protocols import Session
    from handrail.frontends.mcp.connected_client import ConnectedMcpClient


PARSE_ERROR, INVALID_REQUEST, INVALID_PARAMS = -32700, -32600, -32602
BATCH_VERSION = "2025-03-26"
"""The only protocol version in which a client may send several messages as one array."""
MAX_BATCH = 100
"""Maximum number of messages in a batch."""
KEPT_END_BYTES = 4096
"""Bytes at each end of an unread message that are searched for its ID."""
_ID = rb'"id"\s*:\s*(-?\d{1,18}|"[^"\\\x00-\x1f]{1,200}")'
_OTHERS = rb'"(?:jsonrpc|method)"\s*:\s*"[^"\\]{1,200}"'
# Match only an ID that is certainly in the outermost object. An ID inside the params could belong to another request.
_ID_AT_THE_BEGINNING = re.compile(rb"\s*\{\s*(?:" + _OTHERS + rb"\s*,\s*)*" + _ID + rb"\s*[,}]")
_ID_AT_THE_END = re.compile(rb"[\]}\",]\s*,?\s*" + _ID + rb"\s*(?:,\s*" + _OTHERS + rb"\s*)*\}\s*\Z")
_EXPECTED = "Expected one JSON object with `jsonrpc`, `method`, and `id` if it is a request."

JsonObject = dict[str, Any]


class ClientMessages(Struct, frozen=True):
    """The messages in one line or body of a client.

    :ivar texts: the messages to serve, each as JSON text
    :ivar errors: the answers to those that cannot be served
    :ivar is_batch: whether they came as an array
    :ivar request_ids: the IDs of the requests among ``texts``
    """

    texts: Sequence[str] = ()
    errors: Sequence[JsonObject] = ()
    is_batch: bool = False
    request_ids: Sequence[str | int] = ()


def parse_client_messages(raw: bytes, *, serves_batches: bool) -> ClientMessages:
    """Read the messages in a line or body. Nothing is lost: what cannot be served gets an error, if it expects an answer.

    :param raw: within the limits of length and depth
    :param serves_batches: whether the protocol version has batches
    """
    text = raw.removeprefix(codecs.BOM_UTF8).decode(errors="replace").strip()
    if not text:
        return ClientMessages()
    try:
        values = [(orjson.loads(text), text)]
    except orjson.JSONDecodeError:
        try:
            values = list(_parse_leniently(text))
        except ValueError as error:
            why = f"Invalid JSON: {error}. Send each message again as one line of JSON."
            return ClientMessages(errors=[make_json_rpc_error(recover_message_id(raw, raw), PARSE_ERROR, why)])
    if len(values) == 1 and isinstance(
        values[0][0], list
    ):  # read again, because orjson reads a large integer as a float
        return _read_batch(json.loads(values[0][1]), serves_batches=serves_batches)
    return _collect(values, is_batch=False)


def _read_batch(items: list[object], *, serves_batches: bool) -> ClientMessages:
    if not items or len(items) > MAX_BATCH:
        why = f"Invalid batch of {len(items):,} messages. Expected 1 to {MAX_BATCH}."
        return ClientMessages(errors=[make_json_rpc_error(None, INVALID_REQUEST, why)])
    texts = [(item, json.dumps(item, ensure_ascii=False)) for item in items]
    if serves_batches:
        return _collect(texts, is_batch=True)
    why = f"Only protocol version {BATCH_VERSION} has batches. Send each message by itself."
    errors: list[JsonObject] = []
    for item in items:
        problem = validate_client_message(item)
        if problem is not None:
            errors.append(problem)
        elif (asked := _request_id(item)) is not None:
            errors.append(make_json_rpc_error(asked, INVALID_REQUEST, why))
    return ClientMessages(errors=errors)


def _collect(values: Sequence[tuple[object, str]], *, is_batch: bool) -> ClientMessages:
    texts: list[str] = []
    errors: list[JsonObject] = []
    asked: list[str | int] = []
    for given, said in values:
        value, text = _mend_message(given, said)
        if (problem := validate_client_message(value)) is not None:
            errors.append(problem)
        elif _is_servable(cast("JsonObject", value)):
            message = cast("JsonObject", value)
            texts.append(text if "jsonrpc" in message else json.dumps({"jsonrpc": "2.0", **json.loads(text)}))
            if (found := _request_id(cast("JsonObject", value))) is not None:
                asked.append(found)
    return ClientMessages(texts, errors, is_batch, asked)


def _mend_message(value: object, text: str) -> tuple[object, str]:
    """Return a message and its text in the form that the SDKs read, if it has an odd value that means only one thing."""
    message = cast("JsonObject", value) if isinstance(value, dict) else {}
    changes = _list_changes(message)
    asked = message.get("id")
    has_float_id = isinstance(asked, float) and asked.is_integer() and not is_valid_request_id(asked)
    if not changes and not has_float_id:
        return cast("object", value), text
    exact: JsonObject = json.loads(text)  # orjson reads a large integer as a float
    if has_float_id:
        exact["id"] = int(exact["id"])
    for change in changes:
        exact["params"] = change(exact.get("params") or {})
    return exact, json.dumps(exact, ensure_ascii=False)


def _list_changes(message: JsonObject) -> list[Callable[[JsonObject], JsonObject]]:
    """Return the changes of a message's parameters."""
    params, method = message.get("params"), message.get("method")
    if params is None and method == "initialize":
        return [_mend_handshake]
    if not isinstance(params, dict):
        return []
    fields = cast("JsonObject", params)
    changes: list[Callable[[JsonObject], JsonObject]] = []
    if method == "tools/call" and isinstance(fields.get("arguments"), (str, list)):
        changes.append(_mend_call)
    if method == "initialize" and _is_mcp_handshake(fields):
        changes.append(_mend_handshake)
    if method == "logging/setLevel" and isinstance(fields.get("level"), str):
        changes.append(_mend_level)
    if fields.get("cursor") == "":
        changes.append(lambda given: {key: one for key, one in given.items() if key != "cursor"})
    if "_meta" in fields and _mend_meta(fields["_meta"]) is not fields["_meta"]:
        changes.append(lambda given: {**given, "_meta": _mend_meta(given["_meta"])})
    return changes


def _is_mcp_handshake(params: JsonObject) -> bool:
    """Return whether a handshake is one of MCP, and not one of ACP, whose version is a number."""
    version = params.get("protocolVersion")
    return "capabilities" in params or ("clientCapabilities" not in params and not isinstance(version, int))


def _mend_call(params: JsonObject) -> JsonObject:
    """Read arguments that are the JSON text of an object, and an empty list, which some programs write for one."""
    arguments: Any = params["arguments"]
    if isinstance(arguments, str):
        with contextlib.suppress(InvalidJsonTextError):
            return {**params, "arguments": parse_arguments(arguments)}
    return params if arguments else {**params, "arguments": {}}


def _mend_level(params: JsonObject) -> JsonObject:
    level = params["level"].strip().lower()
    return {**params, "level": _LEVELS.get(level, level)}


_LEVELS: Mapping[str, str] = {
    **dict.fromkeys(("trace", "verbose", "all"), "debug"),
    **dict.fromkeys(("fatal", "crit"), "critical"),
    "information": "info",
    "warn": "warning",
    "err": "error",
    "panic": "emergency",
}
"""Levels of other logging systems."""


def _mend_meta(meta: object) -> object:
    """Return metadata without a progress token that cannot be one; None for metadata that is no object."""
    if not isinstance(meta, dict):
        return None
    fields = cast("JsonObject", meta)
    token = fields.get("progressToken", "")
    if isinstance(token, str) or (isinstance(token, int) and not isinstance(token, bool)):
        return fields
    if isinstance(token, float) and token.is_integer() and abs(token) < 2**63:
        return {**fields, "progressToken": int(token)}
    return {key: one for key, one in fields.items() if key != "progressToken"}


def _mend_handshake(params: JsonObject) -> JsonObject:
    """Give a handshake the members that some clients leave out or send as null, a list or a truth."""
    capabilities, client = params.get("capabilities"), params.get("clientInfo")
    offered = cast("JsonObject", capabilities) if isinstance(capabilities, dict) else {}
    named = cast("JsonObject", client) if isinstance(client, dict) else {"name": client}
    texts = {key: one if isinstance(one := named.get(key), str) else "unknown" for key in ("name", "version")}
    kept: JsonObject = {
        key: one if isinstance(one, dict) else {} for key, one in offered.items() if one or isinstance(one, dict)
    }
    version = params.get("protocolVersion")
    if not isinstance(version, str):
        version = BATCH_VERSION
    return {**params, "protocolVersion": version, "capabilities": kept, "clientInfo": {**named, **texts}}


def parse_message(text: str) -> object:
    """Parse one message that :func:`parse_client_messages` returned.

    :raises ValueError: for another text that is not JSON
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)  # with a number that is not finite


def _parse_leniently(text: str) -> Iterator[tuple[object, str]]:
    """Yield the values of a text that is not strictly JSON, each with its text.

    Half a character becomes U+FFFD. Several values may follow each other.
    """
    decoder, position = json.JSONDecoder(), 0
    while position < len(text):
        value, end = decoder.raw_decode(text, position)
        whole = (
            json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        )
        yield json.loads(whole), whole
        position = end
        while position < len(text) and text[position] in " \t\r\n":
            position += 1


def validate_client_message(value: object) -> JsonObject | None:
    """Return the error for an invalid message, or None if it is valid or expects no answer."""
    if not isinstance(value, dict):
        return make_json_rpc_error(None, INVALID_REQUEST, f"Invalid message. {_EXPECTED}")
    message = cast("JsonObject", value)
    if "method" not in message and message.keys() & {"result", "error"}:
        return None
    asked, method, params = message.get("id"), message.get("method"), message.get("params")
    if "id" in message and not is_valid_request_id(asked):
        return make_json_rpc_error(None, INVALID_REQUEST, "Invalid `id`. Expected a string or an integer.")
    if not isinstance(method, str):
        if "method" in message and "id" not in message:
            return None
        return make_json_rpc_error(asked, INVALID_REQUEST, f"Invalid `method`. {_EXPECTED}")
    if "id" not in message:
        return None
    if message.get("jsonrpc", "2.0") != "2.0":
        return make_json_rpc_error(asked, INVALID_REQUEST, 'Invalid `jsonrpc`. Expected "2.0".')
    if params is not None and not isinstance(params, dict):
        return make_json_rpc_error(asked, INVALID_REQUEST, "Invalid `params`. Expected a JSON object.")
    return None


def _is_servable(message: JsonObject) -> bool:
    """Return whether a message without a problem can be served: an invalid notification or answer is dropped."""
    if "method" not in message:
        return is_valid_request_id(message.get("id"))
    form = isinstance(message["method"], str) and message.get("jsonrpc", "2.0") == "2.0"
    return form and (message.get("params") is None or isinstance(message["params"], dict))


def _request_id(value: object) -> str | int | None:
    message = cast("JsonObject", value) if isinstance(value, dict) else {}
    asked = message.get("id")
    return asked if "method" in message and is_valid_request_id(asked) else None


def is_valid_request_id(given: object) -> bool:
    """Return whether a value can be the ID of a request. An integer may be of any size."""
    if isinstance(given, float):  # orjson reads a large integer as a float
        return given.is_integer() and abs(given) >= 2**63
    return isinstance(given, (int, str)) and not isinstance(given, bool)


def recover_message_id(head: bytes, tail: bytes) -> str | int | None:
    """Return the ID of a message that was not read, or None if it cannot be found with certainty.

    :param head: the beginning of the message
    :param tail: its end
    """
    found = _ID_AT_THE_BEGINNING.match(head[:KEPT_END_BYTES]) or _ID_AT_THE_END.search(tail[-KEPT_END_BYTES:])
    try:
        return None if found is None else orjson.loads(found.group(1))
    except orjson.JSONDecodeError:
        return None


def parse_requested_protocol_version(text: str) -> object:
    """Return the protocol version that a message requests, if it is a handshake."""
    message: Any = parse_message(text)
    params: Any = message.get("params") if message.get("method") == "initialize" else None
    return cast("JsonObject", params).get("protocolVersion") if isinstance(params, dict) else None


def to_json_line(message: object) -> bytes:
    """Return a message as one line of JSON. Values without a JSON form become strings."""
    try:
        return orjson.dumps(message, default=str, option=orjson.OPT_APPEND_NEWLINE)
    except (orjson.JSONEncodeError, TypeError):  # half a character, a number too large
        return json.dumps(message, default=str).encode() + b"\n"


def make_json_rpc_error(asked: str | int | None, code: int, text: str) -> JsonObject:
    """Return a JSON-RPC error message."""
    return {"jsonrpc": "2.0", "id": asked, "error": {"code": code, "message": text}}


class BatchResponseCollector:
    """The answers to batches, which are sent as one array each, as soon as all are there."""

    def __init__(self) -> None:
        self._open: dict[str | int, _OpenBatch] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether an answer of a batch is missing."""
        return bool(self._open)

    def add(self, messages: ClientMessages) -> list[JsonObject]:
        """Add a batch, and return its answers if they are complete: if it has no request to serve."""
        batch = _OpenBatch(set(messages.request_ids), list(messages.errors))
        if not batch.missing:
            return batch.answers
        self._open.update(dict.fromkeys(batch.missing, batch))
        return []

    def take(self, answer: Mapping[str, Any]) -> list[JsonObject] | None:
        """Take an answer. Return the answers of its batch once they are complete, [] before, and None if it has none."""
        batch = self._open.pop(answer.get("id", 0.5), None) if self._open and "method" not in answer else None
        if batch is None:
            return None
        batch.answers.append(dict(answer))
        batch.missing.discard(answer["id"])
        return [] if batch.missing else batch.answers


class _OpenBatch(Struct):
    missing: set[str | int]
    answers: list[JsonObject]


# The calls of a client before the server is loaded.


class EarlyClient:
    """A client that makes calls before the server is loaded. The server adopts its session.

    It is the :class:`~handrail.contract.approval_requests.ApprovalHandler` and the
    :class:`~handrail.contract.services.client_services.ClientHandler` of the session. Until the server is loaded, it defers
    each approval and supports no requests. Afterwards the server's own client answers.
    """

    def __init__(self) -> None:
        self.answers: dict[object, CallAnswer] = {}
        """The answers that only the server can send, by request ID."""
        self.session: Session | None = None
        self._adopter: ConnectedMcpClient | None = None

    @property
    def is_adopted(self) -> bool:
        """Whether the server has adopted the session."""
        return self._adopter is not None

    def hand_over(self, client: ConnectedMcpClient) -> Session | None:
        """Return the session for its adoption by the server's client, or None if it has none or was adopted before."""
        if self.session is None or self._adopter is not None:
            return None
        self._adopter = client
        return self.session

    async def approve(self, request: ApprovalRequest) -> ApprovalAnswer:
        return ApprovalAnswer("defer") if self._adopter is None else await self._adopter.approve(request)

    async def answer_questions(self, session_id: str, questions: Sequence[UserQuestion]) -> list[list[str]] | None:
        return None if self._adopter is None else await self._adopter.answer_questions(session_id, questions)

    def supports(self, call_id: str, method: ClientMethod, params: Mapping[str, Any]) -> bool:
        return self._adopter is not None and self._adopter.supports(call_id, method, params)

    async def send_requests(
        self, call_id: str, requests: Mapping[str, RequestToClient]
    ) -> Mapping[str, Mapping[str, Any]]:
        if self._adopter is None:
            raise ToolError("The client is not ready for requests yet. Make the call again.", kind="unavailable")
        return await self._adopter.send_requests(call_id, requests)

    def detach(self, call_id: str) -> None:
        if self._adopter is not None:
            self._adopter.detach(call_id)
