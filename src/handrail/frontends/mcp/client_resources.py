"""Resources and prompts for a client: the stored outputs of its calls, those of tool sources, and skills as prompts."""

from __future__ import annotations

import asyncio
import base64
import os
import stat
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import orjson

from handrail.contract.errors import HandrailError
from handrail.contract.result_conversions import ARTIFACT_URI, build_artifact_uri, list_artifact_media_types
from handrail.contract.services.resource_services import SOURCE_PREFIX
from handrail.contract.struct import Struct
from handrail.record.artifacts import ArtifactStore

if TYPE_CHECKING:
    from handrail.contract.calls_and_results import Result
    from handrail.contract.services.history_and_skill_services import SkillInfo
    from handrail.contract.services.resource_services import PromptSpec, ResourceSpec, ResourceTemplate
    from handrail.contract.tool.resource_provider import ResourceProvider
    from handrail.contract.tool_generation import Generation
    from handrail.frontends.mcp.connected_client import ConnectedMcpClient
    from handrail.kernel.kernel_interface import Kernel


OUTPUT_URI = "handrail://output/"
MAX_OUTPUTS = 200
"""Maximum number of outputs that one client can read as resources. The oldest are removed first."""
MAX_INLINE_BYTES = 8 * 1024 * 1024
"""Maximum bytes of artifacts in one answer. Further artifacts are links."""
MAX_READ_BYTES = 16 * 1024 * 1024
"""Maximum bytes of one output that is read as a resource."""


class CallOutputTooLong(Exception):
    """An output is longer than the limit for one answer."""


class CallOutputResources:
    """The output files and artifacts of one client's session, as resources.

    It gives access to nothing else of the workspace.
    """

    def __init__(self, kernel: Kernel, client: ConnectedMcpClient) -> None:
        self._guest = client
        self._artifacts = ArtifactStore(Path(kernel.state_folder) / "artifacts")
        own = Path(kernel.state_folder)
        self._folders = own.parent.parent / "output" / own.name
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()
        """Listing entries by URI, the oldest first."""
        self._files: dict[str, Path] = {}
        self.change_count = 0
        """Number of changes of the listing so far."""

    @property
    def listed_resources(self) -> list[dict[str, Any]]:
        """The outputs in the form of MCP's resource listing, the oldest first."""
        return list(self._kept.values())

    def add_result_outputs(self, tool_id: str, result: Result, refs: Mapping[str, str]) -> str | None:
        """List the files and artifacts of a result, and return the URI of its output file, if it has one.

        :param refs: the artifacts of the result, with their media types
        """
        for ref, media_type in refs.items():
            self._keep(build_artifact_uri(ref), ref, f"from {tool_id}", media_type)
        named = result.metadata.get("output_path")
        path = Path(named) if isinstance(named, str) else None
        if path is None or path.parent != self._folders / self._guest.session.id:
            return None
        uri = f"{OUTPUT_URI}{path.name}"
        self._files[uri] = path
        self._keep(uri, path.name, f"the whole output of {tool_id}", "text/plain")
        return uri

    def _keep(self, uri: str, name: str, about: str, media_type: str) -> None:
        self.change_count += uri not in self._kept
        self._kept[uri] = {"uri": uri, "name": name, "description": about, "mimeType": media_type}
        self._kept.move_to_end(uri)
        while len(self._kept) > MAX_OUTPUTS:
            gone, _ = self._kept.popitem(last=False)
            self._files.pop(gone, None)

    async def read_output_resource(self, uri: str) -> list[dict[str, Any]] | None:
        """Return the content of a listed output in MCP's form, or None for another URI.

        :raises CallOutputTooLong: if the output is over the limit for one answer
        :raises OSError: if it cannot be read
        """
        if (known := self._kept.get(uri)) is None:
            return None
        media_type = known["mimeType"]
        if (path := self._files.get(uri)) is not None:
            body = await asyncio.to_thread(_read_file, path)
            return [{"uri": uri, "mimeType": media_type, "text": body.decode("utf-8", "replace")}]
        ref = uri.removeprefix(ARTIFACT_URI)
        found = (await self.read_artifacts([ref], MAX_READ_BYTES)).get(ref)
        if found is None:
            raise CallOutputTooLong(
                f"The artifact {ref} is larger than {MAX_READ_BYTES:,} bytes, or no longer exists. Make the call that created it again, with less output."
            )
        return [{"uri": uri, "mimeType": media_type, "blob": base64.b64encode(found).decode()}]

    async def read_full_result_data(self, result: Result) -> object:
        """Return the full data of a truncated result, from its output file.

        :raises CallOutputTooLong: if the data are over the limit for one answer
        :raises OSError: if they cannot be read, or were not saved as JSON
        """
        named = result.metadata.get("output_path")
        path = Path(named) if isinstance(named, str) else None
        if path is None or path.parent != self._folders / self._guest.session.id:
            raise OSError("The full output was not saved.")
        if result.metadata.get("truncated_as") != "JSON text" or "output_save_error" in result.metadata:
            raise OSError("The full output was not saved as JSON.")
        try:
            return orjson.loads(await asyncio.to_thread(_read_file, path))
        except orjson.JSONDecodeError as error:
            raise OSError(f"The saved output is not valid JSON: {error}") from None

    async def read_artifacts(self, refs: Iterable[str], most: int = MAX_INLINE_BYTES) -> dict[str, bytes]:
        """Return the content of artifacts, up to ``most`` bytes in all.

        :param refs: from :func:`collect_result_artifacts`, because this method does not check to whom they belong
        """
        found: dict[str, bytes] = {}
        for ref in refs:
            try:
                data = (await asyncio.to_thread(self._artifacts.get, ref)).data
            except HandrailError:
                continue  # purged
            if len(data) <= most:
                most -= len(data)
                found[ref] = data
        return found


def collect_result_artifacts(result: Result) -> dict[str, str]:
    """Return the artifacts that the kernel put into a result, with their media types.

    References that a tool wrote itself do not count, because they may name artifacts of other clients.
    """
    made = result.metadata.get("artifacts")
    return {ref: kind for ref, kind in list_artifact_media_types(result.data) if ref in made} if made else {}


def _read_file(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise OSError("The path is not a regular file.")
        if about.st_size > MAX_READ_BYTES:
            raise CallOutputTooLong(
                f"The output has {about.st_size:,} bytes. The limit is {MAX_READ_BYTES:,}. Use the tool `read` with ranges."
            )
        return file.read(MAX_READ_BYTES)


# The resources and prompts of tool sources.


class SourceResourcesAndPrompts(Struct, frozen=True):
    """The resources, templates and prompts of all sources of one generation, in MCP's form.

    The operator's own come first.
    """

    resources: tuple[dict[str, Any], ...]
    templates: tuple[dict[str, Any], ...]
    prompts: tuple[dict[str, Any], ...]


_listings: weakref.WeakKeyDictionary[Generation, SourceResourcesAndPrompts] = weakref.WeakKeyDictionary()


def collect_resources_and_prompts(generation: Generation) -> SourceResourcesAndPrompts:
    """Return the resources, templates and prompts of a generation's sources.

    The listing is made once for each generation. If two sources use one name, the third-party one gets its source's name
    as a prefix. Third-party entries name their origin.
    """
    if (known := _listings.get(generation)) is not None:
        return known
    resources: list[dict[str, Any]] = []
    templates: list[dict[str, Any]] = []
    prompts: list[dict[str, Any]] = []
    uris: set[str] = set()
    names: set[str] = set()
    for offering in sorted(generation.resource_providers, key=lambda one: one.is_third_party):
        for resource in offering.resources:
            resources.append({**_resource_entry(resource, offering), "uri": _unique_name(resource.uri, offering, uris)})
        templates += [_template_entry(template, offering) for template in offering.templates]
        for prompt in offering.prompts:
            prompts.append({**_prompt_entry(prompt, offering), "name": _unique_name(prompt.name, offering, names)})
    found = _listings[generation] = SourceResourcesAndPrompts(tuple(resources), tuple(templates), tuple(prompts))
    return found


def _unique_name(name: str, offering: ResourceProvider, taken: set[str]) -> str:
    if name in taken and offering.is_third_party:
        return f"{SOURCE_PREFIX}{offering.source}:{name}"
    taken.add(name)
    return name


def _resource_entry(spec: ResourceSpec, offering: ResourceProvider) -> dict[str, Any]:
    fields = {"name": spec.name, "title": spec.title, "description": spec.description}
    return _without_empty(
        {**_extra_members(spec.more, offering), **fields, "mimeType": spec.media_type, "size": spec.size}
    )


def _template_entry(spec: ResourceTemplate, offering: ResourceProvider) -> dict[str, Any]:
    fields = {"uriTemplate": spec.uri_template, "name": spec.name, "title": spec.title, "description": spec.description}
    return _without_empty({**_extra_members(spec.more, offering), **fields, "mimeType": spec.media_type})


def _prompt_entry(spec: PromptSpec, offering: ResourceProvider) -> dict[str, Any]:
    arguments = [
        _without_empty({"name": one.name, "title": one.title, "description": one.description})
        | {"required": one.required}
        for one in spec.arguments
    ]
    fields = {"title": spec.title, "description": spec.description, "arguments": arguments}
    return _without_empty({**_extra_members(spec.more, offering), **fields})


def _extra_members(more: Mapping[str, Any], offering: ResourceProvider) -> dict[str, Any]:
    if not offering.is_third_party:
        return dict(more)
    meta: Any = more.get("_meta")
    kept: dict[str, Any] = dict(meta) if isinstance(meta, dict) else {}  # pyright: ignore[reportUnknownArgumentType]
    return {**more, "_meta": {**kept, "handrail/origin": offering.source}}


def _without_empty(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members without empty values."""
    return {key: value for key, value in members.items() if value not in ("", None, [])}


def inline_artifacts(value: Any, stored: Mapping[str, bytes]) -> Any:
    """Return JSON data with artifacts as base64 in their places. Missing artifacts become None."""
    if isinstance(value, Mapping):
        members = cast("Mapping[str, Any]", value)
        ref = members.get("artifact")
        if isinstance(ref, str) and "media_type" in members:
            return base64.b64encode(stored[ref]).decode() if ref in stored else None
        return {key: inline_artifacts(one, stored) for key, one in members.items()}
    if isinstance(value, list):
        return [inline_artifacts(one, stored) for one in cast("list[Any]", value)]
    return value


# The skills of a client's session as prompts: the user picks one in the client, as a model would call ``skill``.
#
# To get one is a call of that tool, authorised and recorded like any call. The tool returns a skill's text once in a session.
# A client may request a prompt again, and stateless clients may share a session, so the text is cached here.

SKILL_TOOL = "skill"
SKILL_PREFIX = "skill:"
"""The prefix of a skill's prompt if a source has a prompt of that name."""
MAX_SKILL_TEXTS = 100
"""Maximum number of cached skill texts of one client. A removed text is available again in a new session."""
_TASK = "task"
_ARGUMENTS = [{"name": _TASK, "description": "The task for the skill, in your words", "required": False}]
_UNTRUSTED = "the workspace"


class SkillPrompts:
    """The skills of one client's session as MCP prompts."""

    def __init__(self, kernel: Kernel, client: ConnectedMcpClient) -> None:
        self._kernel = kernel
        self._guest = client
        self._texts: dict[str, dict[str, Any]] = {}
        """The result data of the skill tool, by skill name."""

    def list_prompts(self, taken: Collection[str]) -> list[dict[str, Any]]:
        """Return the skills in the form of MCP's prompt listing.

        :param taken: the names of the prompts of sources
        """
        return [_skill_prompt(skill, name) for name, skill in self._skills_by_prompt(taken).items()]

    def find_skill_by_prompt_name(self, name: str, taken: Collection[str]) -> SkillInfo | None:
        """Return the skill of a prompt name, or None."""
        return self._skills_by_prompt(taken).get(name)

    def _skills_by_prompt(self, taken: Collection[str]) -> dict[str, SkillInfo]:
        if self._kernel.generation.resolve_tool_name(SKILL_TOOL) is None:
            return {}
        return {SKILL_PREFIX + one.name if one.name in taken else one.name: one for one in self._guest.session.skills}

    @staticmethod
    def get_task_argument(arguments: Mapping[str, str]) -> str:
        """Return the task in the arguments of a skill's prompt.

        :raises MCPError: for an unknown argument
        """
        if unknown := arguments.keys() - {_TASK}:
            text = f"Unknown argument {sorted(unknown)[0][:80]!r}. A skill prompt takes only `{_TASK}`."
            from mcp.shared.exceptions import MCPError  # the SDK is loaded after the first answers
            from mcp_types import INVALID_PARAMS

            raise MCPError(INVALID_PARAMS, text)
        return arguments.get(_TASK, "")

    def restore_skill_text(self, result: Result) -> Result:
        """Return a result of the skill tool with the skill's text, also if the session already got it."""
        given: object = result.data
        if not result.ok or not isinstance(given, dict):
            return result
        data = cast("dict[str, Any]", given)
        name = data.get("name")
        if not isinstance(name, str):
            return result
        if data.get("content"):
            while len(self._texts) >= MAX_SKILL_TEXTS:
                del self._texts[next(iter(self._texts))]
            self._texts[name] = data
        return replace(result, data=self._texts.get(name, data))

    @staticmethod
    def make_skill_prompt(skill: SkillInfo, data: Mapping[str, Any], task: str) -> dict[str, Any]:
        """Return the result data of the skill tool as an MCP prompt."""
        lines = [f"The skill {skill.name}, from {data['from']}.", str(data["content"])]
        if data.get("note"):
            lines.append(f"Note: {data['note']}")
        if files := data.get("files"):
            lines.append(f"Files of the skill: {', '.join(map(str, files))}")
        items = [_user_message("\n\n".join(lines)), *([_user_message(task)] if task else [])]
        return {"description": skill.description, "messages": items, "_meta": _labels(skill)}


def _skill_prompt(skill: SkillInfo, name: str) -> dict[str, Any]:
    return {"name": name, "description": skill.description, "arguments": _ARGUMENTS, "_meta": _labels(skill)}


def _labels(skill: SkillInfo) -> dict[str, Any]:
    untrusted = {"handrail/untrusted_source": _UNTRUSTED} if skill.layer == "workspace" else {}
    return {"handrail/skill": skill.layer, **untrusted}


def _user_message(text: str) -> dict[str, Any]:
    return {"role": "user", "content": {"type": "text", "text": text}}
