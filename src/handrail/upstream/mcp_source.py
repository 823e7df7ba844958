"""An upstream server as a source of the registry: its last listing, checked like every third-party source."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from handrail.contract.calls_and_results import Blob
from handrail.contract.errors import Diagnostic, ToolError
from handrail.contract.result_conversions import decode_base64_or_data_uri, format_text_or_json
from handrail.contract.schema.mcp_members import select_valid_members
from handrail.contract.services.resource_services import PromptArgument, PromptSpec, ResourceSpec, ResourceTemplate
from handrail.contract.tool_generation import DiscoveredTool, SourceContents, SourceRank
from handrail.registry.sources.operator_resources import MAX_URI, parse_uri_template_shape
from handrail.upstream import server_definition as listings
from handrail.upstream.client.upstream_session import RpcError, UpstreamConnectionLost
from handrail.upstream.mcp_tool import McpTool, is_same_definition, make_tool_ids, remove_server_prefix, to_tool_error
from handrail.upstream.server_definition import JsonItem, ServerDefinition, ServerListing
from handrail.upstream.server_programs import ServerCommandRejected, resolve_server_program

if TYPE_CHECKING:
    from handrail.contract.services.tool_runtime import Runtime
    from handrail.upstream.upstream_connection import UpstreamServerConnection


# The resources and prompts in a server's listing. Each request is sent on behalf of one call.

_PASSED_KEYS = ("annotations", "icons", "_meta")


class McpResourceProvider:
    """The resources and prompts of one listing."""

    is_third_party = True

    def __init__(
        self, listing: ServerListing, definition: ServerDefinition, upstream: UpstreamServerConnection | None
    ) -> None:
        self._definition = definition
        self._upstream = upstream
        self._subscribes = _object(listing.capabilities.get("resources")).get("subscribe") is True
        self.resources = tuple(found for found in map(_resource, listing.resources) if found is not None)
        self.templates = tuple(found for found in map(_template, listing.templates) if found is not None)
        prefix = definition.name if definition.prefix is None else definition.prefix
        prompts = [found for item in listing.prompts if (found := _prompt(item, prefix)) is not None]
        self.prompts = tuple(spec for spec, _ in prompts)
        self._own_names = {spec.name: own for spec, own in prompts}
        self._uris = frozenset(one.uri for one in self.resources)
        shapes = [parse_uri_template_shape(template.uri_template) for template in self.templates]
        self._shapes = [shape for shape in shapes if shape is not None]

    @property
    def source(self) -> str:
        return self._definition.name

    def has_resource(self, uri: str) -> bool:
        if uri in self._uris:
            return True
        return len(uri) <= MAX_URI and any(shape.can_produce_uri(uri) for shape in self._shapes)

    async def read(self, uri: str, runtime: Runtime) -> Mapping[str, Any]:
        found = await self._ask("resources/read", {"uri": uri}, runtime)
        given = next((found[key] for key in ("contents", "content", "resource") if found.get(key) is not None), None)
        if given is None and found.keys() & {"text", "blob"}:
            given = found
        return {"contents": [_resource_content(one, uri) for one in _list_of(given)]}

    async def get_prompt(self, name: str, arguments: Mapping[str, str], runtime: Runtime) -> Mapping[str, Any]:
        own = self._own_names.get(name)
        if own is None:
            raise ToolError(
                f"MCP server {self.source} has no prompt {name[:100]!r}. List the prompts to get a valid name.",
                kind="invalid_input",
            )
        params: dict[str, Any] = {"name": own}
        if arguments:
            params["arguments"] = dict(arguments)
        found = await self._ask("prompts/get", params, runtime)
        given = next((found[key] for key in ("messages", "content", "prompt") if found.get(key) is not None), None)
        answer: dict[str, Any] = {"messages": [_message(one) for one in _list_of(given)]}
        if isinstance(about := found.get("description"), str):
            answer["description"] = about
        return answer

    async def complete(
        self, ref: Mapping[str, Any], argument: Mapping[str, str], context: Mapping[str, str], runtime: Runtime
    ) -> Mapping[str, Any]:
        about = dict(ref)
        if about.get("type") == "ref/prompt":
            about["name"] = self._own_names.get(str(about.get("name")), about.get("name"))
        params: dict[str, Any] = {"ref": about, "argument": dict(argument)}
        if context:
            params["context"] = {"arguments": dict(context)}
        found = _object((await self._ask("completion/complete", params, runtime)).get("completion"))
        values: Any = found.get("values")
        answer: dict[str, Any] = {
            "values": [one for one in cast("list[Any]", values) if isinstance(one, str)][:100]
            if isinstance(values, list)
            else []
        }
        if isinstance(total := found.get("total"), int):
            answer["total"] = total
        if isinstance(more := found.get("hasMore"), bool):
            answer["hasMore"] = more
        return answer

    async def subscribe(self, uri: str, on_update: Callable[[str], None]) -> Callable[[], Awaitable[None]]:
        upstream = self._upstream
        if upstream is None or not self._subscribes:
            raise ToolError(
                f"MCP server {self.source} does not report changes of resources. Read the resource again when "
                "you need it.",
                kind="unavailable",
            )
        await upstream.ensure_connected()
        try:
            await upstream.subscriptions.subscribe_resource(uri, on_update)
        except RpcError as error:
            raise to_tool_error(self.source, error) from None
        except UpstreamConnectionLost as lost:
            raise ToolError(
                f"MCP server {self.source} is unavailable: {lost.why}. Try again later.", kind="unavailable"
            ) from None
        return lambda: upstream.subscriptions.unsubscribe_resource(uri, on_update)

    async def _ask(self, method: str, params: Mapping[str, Any], runtime: Runtime) -> dict[str, Any]:
        if self._upstream is None:
            raise ToolError(
                f"MCP server {self.source} is not connected in this process, which only lists its resources. "
                "Continue without it.",
                kind="unavailable",
            )
        try:
            return await self._upstream.call(method, params, runtime)
        except RpcError as error:
            raise to_tool_error(self.source, error) from None


def _resource(item: JsonItem) -> ResourceSpec | None:
    uri, size = item.get("uri"), item.get("size")
    if not isinstance(uri, str) or not 0 < len(uri) <= MAX_URI:
        return None
    whole = size if isinstance(size, int) and not isinstance(size, bool) else None
    return ResourceSpec(uri, _text(item, "name") or uri, *_about(item), whole, _more(item))


def _template(item: JsonItem) -> ResourceTemplate | None:
    uri = item.get("uriTemplate")
    if not isinstance(uri, str) or not 0 < len(uri) <= MAX_URI:
        return None
    return ResourceTemplate(uri, _text(item, "name") or uri, *_about(item), _more(item))


def _prompt(item: JsonItem, prefix: str) -> tuple[PromptSpec, str] | None:
    """Return a prompt's spec and the server's own name of it."""
    own = _text(item, "name")
    if not own:
        return None
    given: Any = item.get("arguments")
    if isinstance(given, dict):  # by name
        given = [{"name": name, **_object(one)} for name, one in cast("dict[str, Any]", given).items()]
    arguments = [
        PromptArgument(_text(one, "name"), _text(one, "description"), one.get("required") is True, _text(one, "title"))
        for one in map(_object, cast("list[Any]", given) if isinstance(given, list) else [])
        if _text(one, "name")
    ]
    name = f"{prefix}_{remove_server_prefix(prefix, own)}" if prefix else own
    spec = PromptSpec(name, _text(item, "description"), _text(item, "title"), tuple(arguments), _more(item))
    return spec, own


def _about(item: JsonItem) -> tuple[str, str, str]:
    return _text(item, "description"), _text(item, "title"), _text(item, "mimeType")


def _more(item: JsonItem) -> dict[str, Any]:
    return select_valid_members({key: item[key] for key in _PASSED_KEYS if key in item})


def _list_of(given: object) -> list[object]:
    """Return the items that a server sent, also if it sent one without a list."""
    if given is None:
        return []
    return cast("list[object]", given) if isinstance(given, list) else [given]


def _resource_content(one: object, uri: str) -> dict[str, Any]:
    """Return one content of a resource, also if the server sent only its text."""
    fields = select_valid_members(_object(one)) or {"text": one}
    if not isinstance(fields.get("uri"), str):
        fields["uri"] = uri
    if isinstance(fields.get("blob"), str):
        return _decode_base64_part(fields, "blob")
    if not isinstance(fields.get("text"), str):
        fields["text"] = format_text_or_json(fields.get("text"))
    return fields


def _message(given: object) -> dict[str, Any]:
    """Return one message of a prompt, also if the server sent only its text."""
    message = {**_object(given)} or {"content": given}
    if message.get("role") not in ("user", "assistant"):
        message["role"] = "user"
    content = message.get("content")
    if not isinstance(content, dict):
        blocks = [_text_of_block(one) for one in _list_of(content)]
        return {**message, "content": {"type": "text", "text": "\n".join(blocks)}}
    return {**message, "content": _prompt_content(select_valid_members(cast("dict[str, Any]", content)))}


def _prompt_content(block: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a prompt's message; one that no client knows becomes its JSON as text."""
    match block.get("type"):
        case "text" if isinstance(block.get("text"), str):
            return block
        case "image" | "audio" if isinstance(block.get("data"), str):
            decoded = _decode_base64_part(block, "data")
            if isinstance(blob := decoded["data"], Blob):
                return {**decoded, "mimeType": blob.media_type}
        case "resource":
            resource = select_valid_members(_object(block.get("resource")))
            if isinstance(resource.get("uri"), str) and any(
                isinstance(resource.get(one), str) for one in ("text", "blob")
            ):
                return {**block, "resource": _decode_base64_part(resource, "blob")}
        case "resource_link" if isinstance(block.get("uri"), str) and isinstance(block.get("name"), str):
            return block
        case _:
            pass
    return {"type": "text", "text": _text_of_block(block)}


def _text_of_block(one: object) -> str:
    text = _object(one).get("text")
    return text if isinstance(text, str) else format_text_or_json(one)


def _decode_base64_part(part: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a part with the base64 under ``key`` decoded, so that it is stored like any binary output."""
    data = part.get(key)
    if not isinstance(data, str):
        return part
    found = decode_base64_or_data_uri(data)
    if found is None:
        return {**part, "problem": "its data is not base64"}
    body, own = found
    return {**part, key: Blob(body, _text(part, "mimeType") or own or "application/octet-stream")}


def _text(item: Mapping[str, Any], key: str) -> str:
    value = item.get(key)
    return value if isinstance(value, str) else ""


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


class McpSource:
    """An upstream server as a source. Loading uses the cached listing and does not connect.

    :param upstream: None in a process that only lists tools
    """

    rank: SourceRank = "package"
    is_third_party = True

    def __init__(
        self,
        definition: ServerDefinition,
        state: Path,
        workspace: str,
        upstream: UpstreamServerConnection | None = None,
    ) -> None:
        self.definition = definition
        self.upstream = upstream
        self.gone = False
        """Whether the server was removed, so that it has no tools any more."""
        self._state = state
        self._workspace = workspace
        self._requires = definition.requires
        self._made: dict[str, McpTool] = {}
        self._offered: tuple[object, McpResourceProvider] | None = None

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def last_listing(self) -> ServerListing | None:
        """The last known listing; None before the first connection."""
        if self.upstream is not None:
            return self.upstream.listing
        return listings.read_cached_listing(self._state, self.name, self.definition.definition_hash)

    def explain_misconfiguration(self) -> str:
        """Return the reason why the server cannot be used as configured; empty if it can."""
        if self.definition.missing_reason:
            return self.definition.missing_reason
        if self.definition.transport == "stdio":
            try:
                resolve_server_program(self.definition, self._state, self._workspace, to_start=False)
            except ServerCommandRejected as error:
                return str(error)
        return ""

    def explain_unreachable(self) -> str:
        """Return why the server is unreachable, with the time of the next attempt; empty if it is not."""
        if fault := self.explain_misconfiguration():
            return f"MCP server {self.name} cannot be used: {fault}"
        if self.upstream is not None and self.upstream.state == "waiting":
            return (
                f"MCP server {self.name} cannot be reached: {self.upstream.reason}; the next attempt is in "
                f"{self.upstream.seconds_until_retry} s"
            )
        return ""

    @property
    def prefix(self) -> str:
        return self.name if self.definition.prefix is None else self.definition.prefix

    def describe_status(self) -> str:
        """Return why the tools of the server are unknown, for models."""
        if fault := self.explain_misconfiguration():
            return f"MCP server {self.name} cannot be used: {fault}. The user can see details with: handrail mcp list"
        nobody = f"the tools of MCP server {self.name} are not known yet"
        review = f"The user then has to approve them with: handrail sources review {self.name}"
        upstream = self.upstream
        if upstream is None:
            return f"{nobody}: it was never connected. {review}"
        if upstream.state == "closed":
            return f"{nobody}, and it is closed, as is its kernel"
        if upstream.state == "waiting":
            return f"{nobody}: {upstream.reason}; the next attempt is in {upstream.seconds_until_retry} s. {review}"
        if upstream.reason:
            return f"{nobody}: {upstream.reason}; it is connecting again. Try again in a moment. {review}"
        return f"{nobody}: it is connecting for the first time. Try again in a moment. {review}"

    def load(self) -> SourceContents:
        if self.gone:
            return SourceContents(name=self.name)
        faults: list[Diagnostic] = []
        if fault := self.explain_misconfiguration():
            faults.append(Diagnostic(self.definition.place, "", fault))
        listing = self.last_listing
        if listing is None:
            return SourceContents((), tuple(faults), self.name, self.definition.about, unlisted=self)
        found: list[DiscoveredTool] = []
        made: dict[str, McpTool] = {}
        ids = make_tool_ids(self.prefix, (name for item in listing.tools if (name := _text(item, "name"))))
        for item in listing.tools:
            tool = self._make_tool(item, ids.get(_text(item, "name"), ""), made, faults)
            if tool is not None:
                found.append(DiscoveredTool(tool, f"mcp server {self.name}"))
        if listing.left_out:
            faults.append(
                Diagnostic(
                    f"mcp server {self.name}", "", f"{listing.left_out} listed items exceed the limits and are left out"
                )
            )
        faults += [Diagnostic(f"mcp server {self.name}", "", problem) for problem in listing.problems]
        self._made = made
        offering = self._make_resources(listing)
        return SourceContents(tuple(found), tuple(faults), self.name, self.definition.about, resource_provider=offering)

    def _make_resources(self, listing: ServerListing) -> McpResourceProvider | None:
        """Return the resources of a listing. The object is the same while they are unchanged."""
        key = listing.resources, listing.templates, listing.prompts
        if not any(key):
            return None
        if self._offered is None or self._offered[0] != key:
            self._offered = key, McpResourceProvider(listing, self.definition, self.upstream)
        return self._offered[1]

    def _make_tool(
        self, item: JsonItem, tool_id: str, made: dict[str, McpTool], faults: list[Diagnostic]
    ) -> McpTool | None:
        name = str(item.get("name"))
        if name in made:
            faults.append(Diagnostic(f"mcp server {self.name}", name, "is listed twice; only the first counts"))
            return None
        known = self._made.get(name)
        if known is not None and known.spec.id == tool_id and is_same_definition(known.item, item):
            made[name] = known
            return known
        try:
            made[name] = tool = McpTool(item, self.upstream, self.definition, self._requires, tool_id)
        except (ValueError, TypeError, RecursionError) as error:
            faults.append(Diagnostic(f"mcp server {self.name}", name[:100], str(error)))
            return None
        return tool
