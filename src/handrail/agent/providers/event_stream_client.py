"""The HTTP client of the providers' SDKs: it gives them an event stream, also where a server answers with something else.

Some servers ignore ``stream: true`` and answer with one JSON object. Some report an error with the status 200. A wrong
address often answers with a web page.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, cast

import httpx2

from handrail.agent.model_protocol import ProviderBusy, ReplyStreamCut, RequestRejected
from handrail.agent.providers.provider_errors import extract_html_page_text
from handrail.contract.text.event_stream_text import EventStreamCleaner

MAX_WHOLE_BYTES = 32 * 1024 * 1024
"""The largest answer that is not a stream."""
_CONNECT_S, _LONGEST_WAIT_S = 10.0, 600.0
_BOM = b"\xef\xbb\xbf"

Event = tuple[str | None, Mapping[str, Any]]
"""The name of a server-sent event, if it has one, and its data."""
ConvertBody = Callable[[dict[str, Any]], Iterable[Event]]
"""Converts a whole answer to the events of a stream."""


class EventStreamClient(httpx2.AsyncClient):
    """A client whose successful answers to streaming requests are event streams.

    :param name: the model, as the operator wrote it
    :param convert: converts an answer that is one JSON object
    :param needs_names: whether the SDK skips events without a name
    :param repair: corrects the data of an event that the SDK would not read
    """

    def __init__(
        self,
        name: str,
        convert: ConvertBody,
        *,
        needs_names: bool = False,
        repair: Callable[[bytes], bytes] | None = None,
    ) -> None:
        super().__init__(timeout=httpx2.Timeout(_LONGEST_WAIT_S, connect=_CONNECT_S), follow_redirects=True)
        self._name = name
        self._convert = convert
        self._needs_names = needs_names
        self._repair = repair

    async def send(self, request: httpx2.Request, *, stream: bool = False, **more: Any) -> httpx2.Response:
        """Send a request; see :meth:`httpx2.AsyncClient.send`.

        :raises RequestRejected: if the answer is a web page
        :raises ReplyStreamCut: if it is empty or incomplete
        :raises ProviderBusy: if it is longer than :data:`MAX_WHOLE_BYTES`
        """
        response = await super().send(request, stream=stream, **more)
        if not response.is_success or not stream:
            return response
        pieces = response.aiter_bytes()
        start = b""
        while not start.removeprefix(_BOM).strip():  # the content type is wrong more often than the content
            if (piece := await anext(pieces, None)) is None:
                break
            start += piece
        if start.removeprefix(_BOM).lstrip()[:1] in (b"{", b"[", b"<", b""):
            return self._make_stream(response, await self._read_whole_body(response, start, pieces))
        cleaner = EventStreamCleaner(needs_names=self._needs_names, repair=self._repair)
        return httpx2.Response(
            200,
            headers=_without_lengths(response),
            stream=_CleanStream(response, start, pieces, cleaner),
            request=request,
            extensions=response.extensions,
        )

    async def _read_whole_body(self, response: httpx2.Response, start: bytes, rest: AsyncIterator[bytes]) -> bytes:
        pieces = [start]
        size = len(start)
        try:
            async for piece in rest:
                size += len(piece)
                if size > MAX_WHOLE_BYTES:
                    raise ProviderBusy(
                        f"{self._name}: The answer is longer than {MAX_WHOLE_BYTES:,} bytes. Ask for a shorter one, or check the base URL."
                    )
                pieces.append(piece)
        finally:
            await response.aclose()
        return b"".join(pieces)

    def _make_stream(self, response: httpx2.Response, body: bytes) -> httpx2.Response:
        text = body.removeprefix(_BOM).decode("utf-8", "replace")
        try:
            given: Any = _parse_objects(text)
        except (ValueError, RecursionError):
            if text.lstrip()[:1] in ("{", "[", ""):
                raise ReplyStreamCut(
                    f"{self._name}: The answer is incomplete JSON ({len(body):,} bytes). Resume the run to ask again."
                ) from None
            page_text = " ".join(extract_html_page_text(text).split())[:300]
            raise RequestRejected(
                f"{self._name}: {response.request.url} returned a page instead of a reply ({page_text}). Check the base URL.",
                about="nothing",
            ) from None
        items = cast("list[Any]", given) if isinstance(given, list) else [given]
        objects = [cast("dict[str, Any]", item) for item in items if isinstance(item, dict)]
        encoded = b"".join(_encode_event(*event) for item in objects for event in self._convert(item))
        headers = {**_without_lengths(response), "content-type": "text/event-stream"}
        return httpx2.Response(200, headers=headers, content=encoded, request=response.request)


def _parse_objects(text: str) -> object:
    """Return the JSON value of ``text``, or a list of one value a line. Some lines may have the form of events."""
    try:
        return json.loads(text)
    except ValueError:
        lines = [line.strip().removeprefix("data:").strip() for line in text.split("\n")]
        if not (values := [line for line in lines if line not in ("", "[DONE]")]):
            raise
        return [json.loads(line) for line in values]


def has_end_mark(response: httpx2.Response) -> bool:
    """Return whether the event stream of a response had the mark of a complete reply, ``[DONE]``."""
    return isinstance(response.stream, _CleanStream) and response.stream.cleaner.has_end_mark


class _CleanStream(httpx2.AsyncByteStream):
    """The decoded body of a response, cleaned.

    :param start: the part that is read already, before ``rest``
    """

    def __init__(
        self, response: httpx2.Response, start: bytes, rest: AsyncIterator[bytes], cleaner: EventStreamCleaner
    ) -> None:
        self._response, self._start, self._rest = response, start, rest
        self.cleaner = cleaner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if cleaned := self.cleaner.feed(self._start):
            yield cleaned
        async for piece in self._rest:
            if cleaned := self.cleaner.feed(piece):
                yield cleaned
        if cleaned := self.cleaner.close():
            yield cleaned

    async def aclose(self) -> None:
        await self._response.aclose()


def _without_lengths(response: httpx2.Response) -> dict[str, str]:
    skipped = ("content-length", "content-encoding", "transfer-encoding")
    return {key: value for key, value in response.headers.items() if key.lower() not in skipped}


def _encode_event(name: str | None, data: Mapping[str, Any]) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()
