"""The first answers to a client on stdin and stdout, given before the SDK is there to give them.

To load the SDK takes longer than to open a kernel. What nearly every client says first, its hello and its request for the
tools, is answered from here meanwhile, where it has the plainest form that there is. All of it is then said to the server
again, whose answers are kept back: so the server knows the client as if it had answered by itself, and where it would have
listed other tools, the client is told that the list has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson

from handrail.frontends.mcp.greeting import EXTENSIONS, greeting
from handrail.frontends.mcp.serving import Serving
from handrail.frontends.mcp.stdio import wire
from handrail.frontends.mcp.tools import DOOR, DOOR_TOOL, as_tool, page_from, specs_of

if TYPE_CHECKING:
    from handrail.kernel.kernel import Kernel

OLDER = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
NEWER = "2026-07-28"
"""The versions of the protocol whose first requests are answered here."""
MOST_EARLY = 8
"""Messages that are taken here; a client that says more is past its beginning."""
PATIENCE_S = 0.5
"""After a hello with nothing behind it, the server is made ready all the same."""
_ENVELOPE = "io.modelcontextprotocol/"
_CAPABILITIES = {"roots", "sampling", "elicitation", "experimental", "extensions", "tasks"}
_CHANGED = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
_Json = dict[str, Any]


class Output(Protocol):
    """What takes lines for a client."""

    async def write(self, text: str) -> None: ...

    async def flush(self) -> None: ...


async def serve(kernel: Kernel, serving: Serving | None = None, started: Callable[[], object] = lambda: None) -> None:
    """Serve one client on this process's stdin and stdout until it hangs up. Nothing else may use stdout meanwhile.

    :param started: called when all that is needed is loaded
    """
    serving = serving or Serving()
    async with wire() as ends:
        if ends is None:
            server = import_module("handrail.frontends.mcp.server")
            started()
            await server.serve_on(kernel, serving, None)
            return
        lines, output = ends
        reception = Reception(kernel, serving, output)
        if await reception.receive(lines):
            server = await reception.server()
            started()
            try:
                await server.serve_on(kernel, serving, (reception.resumed(lines), reception.answers()))
            except* ConnectionError:
                pass  # it has hung up, and reads no more


class Reception:
    """See the module.

    :param output: what takes the answers, each a line
    """

    def __init__(self, kernel: Kernel, serving: Serving, output: Output) -> None:
        self._kernel = kernel
        self._serving = serving
        self._output = output
        self._read: list[str] = []
        """All that the client has said."""
        self._given: dict[object, _Json] = {}
        """What was answered, by the request's id."""
        self._hello: _Json | None = None
        """What the older era's handshake, or each request of the newer one, said of the client."""
        self._loading: asyncio.Task[Any] | None = None

    async def receive(self, lines: AsyncIterator[str]) -> bool:
        """Answer what can be answered here, up to the first message that cannot; whether the client is still there."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None
        try:
            async for line in lines:
                self._read.append(line)
                message = _message(line)
                if message is None or len(self._read) > MOST_EARLY:
                    return True
                answer = self._answer(message)
                if answer is None and message.get("method") != "notifications/initialized":
                    return True
                if answer is not None:
                    self._given[message["id"]] = answer
                    await self._say({"jsonrpc": "2.0", "id": message["id"], "result": answer})
                    if "tools" in answer:
                        return True
                    timer = timer or loop.call_later(PATIENCE_S, self._load)
        except ConnectionError:
            pass  # it has hung up
        finally:
            if timer is not None:
                timer.cancel()
        return False

    async def server(self) -> Any:
        """The module of the server, once it is loaded. The event loop goes on meanwhile."""
        return await self._load()

    async def resumed(self, lines: AsyncIterable[str]) -> AsyncIterator[str]:
        """All that the client has said, from the beginning."""
        for line in self._read:
            yield line
        async for line in lines:
            yield line

    def answers(self) -> Answers:
        """What takes the server's answers for the client."""
        tells = self._hello is not None and "protocolVersion" in self._hello
        return Answers(self._output, self._given, tells=tells)

    def _load(self) -> asyncio.Task[Any]:
        if self._loading is None:
            loaded = asyncio.to_thread(import_module, "handrail.frontends.mcp.server")
            self._loading = asyncio.create_task(loaded, name="mcp server: loading")
        return self._loading

    async def _say(self, message: Mapping[str, Any]) -> None:
        await self._output.write(orjson.dumps(message).decode() + "\n")
        await self._output.flush()

    # ── what is answered ─────────────────────────────────────────────────────────────────────────

    def _answer(self, message: _Json) -> _Json | None:
        """The result of a request, as the server would give it; None for what is left to the server."""
        method, params = message.get("method"), message.get("params", {})
        if not _is_id(message.get("id")) or message["id"] in self._given or not isinstance(params, dict):
            return None
        given = cast("_Json", params)
        try:
            if method == "initialize":
                return self._initialize(given)
            if method == "server/discover":
                return self._discover(given)
            return self._list(given) if method == "tools/list" else None
        except (orjson.JSONEncodeError, RecursionError):
            return None

    def _initialize(self, params: _Json) -> _Json | None:
        if self._hello is not None or params.keys() != {"protocolVersion", "capabilities", "clientInfo"}:
            return None
        wanted = params["protocolVersion"]
        if wanted not in OLDER or not _is_client(params["clientInfo"], params["capabilities"]):
            return None
        self._hello = params
        return {"protocolVersion": wanted, **greeting(self._kernel)}

    def _discover(self, params: _Json) -> _Json | None:
        if params.keys() != {"_meta"} or not self._is_same(params["_meta"]):
            return None
        said = greeting(self._kernel)
        capabilities = {**said["capabilities"], "extensions": EXTENSIONS}
        about = {"capabilities": capabilities, "instructions": said["instructions"]}
        return self._whole({"supportedVersions": [NEWER], **about}, said["serverInfo"])

    def _list(self, params: _Json) -> _Json | None:
        newer = self._hello is None or "protocolVersion" not in self._hello
        if newer and (params.keys() != {"_meta"} or not self._is_same(params["_meta"])):
            return None
        if not newer and (params.keys() - {"_meta"} or not _is_plain_meta(params.get("_meta", {}))):
            return None
        discovery, kernel = self._serving.discovery, self._kernel
        tools = [as_tool(kernel, spec) for spec in specs_of(kernel, discovery, None)]
        if newer and discovery == "core" and kernel.generation.resolve(DOOR) is None:
            tools.append(dict(DOOR_TOOL))
        page = page_from("tools", tools, 0)
        return self._whole(page, greeting(kernel)["serverInfo"]) if newer else page

    @staticmethod
    def _whole(result: _Json, about: Mapping[str, str]) -> _Json:
        """What every result of the newer era says."""
        stamp = {f"{_ENVELOPE}serverInfo": about}
        return {"cacheScope": "private", "resultType": "complete", "ttlMs": 0, **result, "_meta": stamp}

    def _is_same(self, envelope: object) -> bool:
        """Whether a request of the newer era is of a client that is known, or of the first one."""
        if not isinstance(envelope, dict) or (self._hello is not None and envelope != self._hello):
            return False
        said = cast("_Json", envelope)
        if said.keys() != {f"{_ENVELOPE}{key}" for key in ("protocolVersion", "clientInfo", "clientCapabilities")}:
            return False
        client, capabilities = said[f"{_ENVELOPE}clientInfo"], said[f"{_ENVELOPE}clientCapabilities"]
        if said[f"{_ENVELOPE}protocolVersion"] != NEWER or not _is_client(client, capabilities):
            return False
        self._hello = said
        return True


class Answers:
    """Passes on what a server says but its answers to what was answered before it.

    :param given: by the request's id, what was answered
    :param tells: whether the client is told of changes without having asked for it
    """

    def __init__(self, output: Output, given: Mapping[object, _Json], *, tells: bool) -> None:
        self._output = output
        self._given = dict(given)
        self._tells = tells

    async def write(self, text: str) -> None:
        if self._given and (message := _message(text)) is not None and "method" not in message:
            given = self._given.pop(message.get("id"), None)
            if given is not None:
                if not self._tells or "tools" not in given or message.get("result") == given:
                    return
                text = orjson.dumps(_CHANGED).decode() + "\n"
        await self._output.write(text)

    async def flush(self) -> None:
        await self._output.flush()


def _message(line: str) -> _Json | None:
    """A JSON-RPC message, as far as it is one."""
    with contextlib.suppress(orjson.JSONDecodeError):
        message: object = orjson.loads(line)
        if isinstance(message, dict):
            found = cast("_Json", message)
            known = found.keys() <= {"jsonrpc", "id", "method", "params", "result", "error"}
            return found if known and found.get("jsonrpc") == "2.0" else None
    return None


def _is_id(given: object) -> bool:
    return isinstance(given, (int, str)) and not isinstance(given, bool)


def _is_client(about: object, capabilities: object) -> bool:
    """Whether a client says of itself what every version of the protocol takes, in the plainest form."""
    if not isinstance(about, dict) or not isinstance(capabilities, dict):
        return False
    texts, can = cast("_Json", about), cast("_Json", capabilities)
    if not {"name", "version"} <= texts.keys() or not all(isinstance(one, str) for one in texts.values()):
        return False
    return can.keys() <= _CAPABILITIES and all(map(_is_plain, can.values()))


def _is_plain(value: object) -> bool:
    """Whether it is an object of such objects, beside whether it tells of changes."""
    if not isinstance(value, dict):
        return False
    items = cast("_Json", value).items()
    return all(isinstance(one, bool) if key == "listChanged" else _is_plain(one) for key, one in items)


def _is_plain_meta(meta: object) -> bool:
    return isinstance(meta, dict) and meta.keys() <= {"progressToken"} and all(map(_is_id, meta.values()))  # pyright: ignore[reportUnknownMemberType,reportUnknownArgumentType]
