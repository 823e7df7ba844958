"""``handrail build AGENT``: an agent with its tools, frozen into a bundle, and the builds of their executables.

The bundle is a complete configuration folder: the agent's manifest, its settings, and the manifests, modules and programs of
its tools, with overrides resolved and a hash for each file. It includes the agents that it can delegate to, directly and
indirectly, and the operator's skills if one of them reads skills. Readers check the hashes first. Built-in tools and tools of
installed packages are listed by their definitions, because Handrail and those packages provide them where the bundle starts.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import re
import shlex
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from handrail.authoring.tool_linter import raise_on_program_start
from handrail.config import FILE_NAME, MergedConfiguration
from handrail.contract.agent_manifest import AGENT_TOOL_PREFIX, DEFAULT_AGENT
from handrail.contract.errors import Diagnostic, LoadError, ToolError, UsageError
from handrail.contract.sandbox_protocol import ProgramSpec, Sandbox, SandboxProfile
from handrail.contract.struct import Struct
from handrail.contract.text.text_encodings import decode_settings_text
from handrail.contract.tool.requires import CapabilityLayer, CapabilitySet, ShellRequires
from handrail.contract.tool_generation import Generation, ToolEntry
from handrail.kernel.agent_loading import (
    iterate_agents,
    load_agent,
    load_tools_and_rules,
    make_placeholder_secrets,
    make_tool_sources,
)
from handrail.registry.agent_folders import AGENT_FILE, BUNDLE_FILE, SealedFile, format_bundle_json, hash_file_for_seal
from handrail.registry.generation_loader import NOT_BUILT
from handrail.registry.sources.executable_tools import PerCallExecutableTool, ToolConfinement
from handrail.registry.sources.operator_resources import MAX_RESOURCES_FILE_BYTES, RESOURCES_FILE, parse_resources
from handrail.registry.sources.tool_folder_source import (
    PerCallModuleTool,
    find_executable_problem,
    read_file_within_limit,
)
from handrail.sandbox.configured_sandbox import ConfiguredSandbox
from handrail.session.session_skills import FILE as SKILL_FILE
from handrail.store.state_folders import StateFolders

# The executables that ``handrail build`` makes from source folders, each with the build command of its tool.
#
# A build runs in a sandbox on a copy of the tool's folder: without network, with no other writable folder, and with a time
# limit. The operator's folder does not change. The bundle receives the content of the copy afterwards.

MAX_OUTPUT_BYTES = 16 * 1024 * 1024
"""The maximum size of a build's output that is shown, in bytes; the rest is read and dropped."""
MAX_FILES, MAX_BYTES = 20_000, 1024 * 1024 * 1024
"""The limits of a built folder."""
OutputWriter = Callable[[str], None]
"""Shows text, in complete lines."""


def build_tool_executables(
    tools: Iterable[PerCallExecutableTool], sandbox: Sandbox, work_folder: Path, write: OutputWriter
) -> dict[str, Path]:
    """Run the build commands of tools, one after the other. Tools that share a folder share its copy.

    :param tools: the tools with a build command
    :param work_folder: an empty folder for the copies
    :param write: receives the commands and their output as they run
    :returns: the built copies, by the original folder of the tool
    :raises LoadError: with all builds that failed
    """
    folders: dict[str, dict[str, PerCallExecutableTool]] = {}
    for tool in tools:
        folders.setdefault(tool.folder, {})[tool.executable] = tool
    if not folders:
        return {}
    with ThreadPoolExecutor(1, "handrail-build") as thread:  # the caller may run an event loop
        return thread.submit(asyncio.run, _build_folders(folders, sandbox, work_folder, write)).result()


async def _build_folders(
    folders: Mapping[str, Mapping[str, PerCallExecutableTool]], sandbox: Sandbox, room: Path, tell: OutputWriter
) -> dict[str, Path]:
    made: dict[str, Path] = {}
    faults: list[Diagnostic] = []
    try:
        for number, (own, tools) in enumerate(folders.items()):
            place = room / str(number)
            place.mkdir(mode=0o711)
            made[own] = folder = place / Path(own).name
            try:
                shutil.copytree(own, folder, symlinks=True)
            except OSError as error:  # one error for several files
                faults.append(Diagnostic(own, "", f"Cannot copy the folder for the build: {error}."))
                continue
            done: set[tuple[str, ...]] = set()
            for tool in tools.values():
                try:
                    if tool.spec.build not in done:
                        await _run_build(tool, sandbox, folder, tell)
                        done.add(tool.spec.build)
                    _check_build_result(tool, folder)
                except ToolError as error:
                    faults.append(Diagnostic(tool.spec.id, "runtime.build", error.text))
    finally:
        if isinstance(sandbox, ConfiguredSandbox):
            await sandbox.aclose()
    if faults:
        raise LoadError(faults)
    return made


async def _run_build(tool: PerCallExecutableTool, sandbox: Sandbox, folder: Path, tell: OutputWriter) -> None:
    """Run the build command of one tool.

    :raises ToolError: if the build cannot run, takes too long or fails
    """
    spec, here, home = tool.spec, str(folder), folder.parent / "home"
    command, lines = shlex.join(spec.build), _BuildOutputPrinter(f"{spec.id}: ", tell)
    if not sandbox.tier.is_confining:
        raise ToolError(
            f"Cannot build without a sandbox: {sandbox.tier.detail}. Build it on a machine that can confine programs."
        )
    home.mkdir(mode=0o755, exist_ok=True)
    tell(f"{spec.id}: {command}\n")
    any_program = ShellRequires(cmd="*")
    capabilities = CapabilitySet((CapabilityLayer("handrail build", (here,), (here,), (), (any_program,)),))
    process = await sandbox.start(
        capabilities, SandboxProfile(here, str(home)), ProgramSpec(spec.build, merge_stderr=True)
    )
    try:
        async with asyncio.timeout(spec.build_timeout_ms / 1000):
            await process.communicate(b"", MAX_OUTPUT_BYTES, lines.feed)
            code = await process.wait()
    except TimeoutError:
        raise ToolError(
            f"`{command}` timed out after {spec.build_timeout_ms} ms and was stopped. Increase `build_timeout_ms`."
        ) from None
    finally:
        await process.kill()
        lines.flush()
    if code != 0:
        message = f" Last line of its output: {lines.last}." if lines.last else ""
        raise ToolError(f"`{command}` ended with exit code {code}.{message} Correct the tool, then build again.")


def _check_build_result(tool: PerCallExecutableTool, folder: Path) -> None:
    """Check the result of a build.

    :raises ToolError: if the executable is missing or invalid, or the folder contains something that cannot be frozen
    """
    command = shlex.join(tool.spec.build)
    named = str(Path(tool.executable).relative_to(Path(tool.folder).parent))
    executable = folder.parent / named
    if not executable.exists():
        raise ToolError(
            f"`{command}` did not create {named!r}. Expected the executable that `exec_path` names. Correct `build` or `exec_path`."
        )
    if problem := find_executable_problem(folder.parent, named, executable.resolve()):
        raise ToolError(f"`{command}` created a file that cannot be run: {problem}. Correct `build`.")
    if problem := next(_find_problems(folder), None):
        raise ToolError(f"`{command}` created a folder that cannot be frozen: {problem}")


def _find_problems(folder: Path) -> Iterator[str]:
    count = size = 0
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        try:
            found = path.stat()
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}. Correct its permissions."
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            yield f"{name} is a link to a file outside the tool's folder. Put the file itself there."
        elif not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            yield f"{name} is not a regular file. Remove it, or replace it with one."
        count, size = count + 1, size + found.st_size
    if count > MAX_FILES or size > MAX_BYTES:
        yield f"{count:,} files with {size:,} bytes. The maximum is {MAX_FILES:,} files with {MAX_BYTES:,} bytes."


class _BuildOutputPrinter:
    """A writer that splits a build's output into complete lines, each prefixed with the tool's id."""

    def __init__(self, begin: str, tell: OutputWriter) -> None:
        self._begin, self._tell = begin, tell
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._rest = ""
        self.last = ""

    def feed(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + self._decode(piece)).split("\n")
        for line in lines:
            self._show(line)

    def flush(self) -> None:
        if self._rest:
            self._show(self._rest)
            self._rest = ""

    def _show(self, line: str) -> None:
        self.last = line[:500] if line.strip() else self.last
        with contextlib.suppress(OSError):  # the reader has closed its end
            self._tell(f"{self._begin}{line}\n")


TASK_TOOL, SKILL_TOOL = "task", "skill"
"""The ids of the tools with which an agent delegates work and reads skills."""
_AGENT_KEY = re.compile(r"""^[ \t]*(?:agent|"agent"|'agent')[ \t]*=.*$""", re.MULTILINE)


class AgentBundle(Struct, frozen=True):
    """A bundle that was built.

    :param hash: the SHA-256 of its bundle file, which contains the hashes of all other files
    :param agents: the further agents in it, to which work can be delegated
    :param tools: the ids of the frozen tools
    :param built_tools: the ids of the tools whose executable was built by their build command
    :param external_tools: the ids of the tools of Handrail and installed packages
    :param unavailable: the ids of tools that are unavailable on this machine, with the reason
    """

    folder: Path
    agent: str
    hash: str
    files: tuple[str, ...]
    agents: tuple[str, ...]
    tools: tuple[str, ...]
    external_tools: tuple[str, ...]
    unavailable: dict[str, str]
    built_tools: tuple[str, ...]


def build_agent_bundle(
    config: MergedConfiguration,
    agent: str,
    folders: StateFolders,
    sandbox: Sandbox,
    target: Path,
    write: OutputWriter = lambda _: None,
) -> AgentBundle:
    """Validate an agent, build the executables of its tools, and freeze everything into a folder.

    :param target: a folder that does not exist or is empty
    :param write: receives the output of builds as it arrives
    :raises UsageError: if the agent does not exist, or ``target`` is not empty
    :raises LoadError: with all faults of the agent, its tools and rules
    :raises OSError: if ``target`` cannot be written
    """
    _check_target(target)
    looking = ToolConfinement(sandbox, raise_on_program_start, raise_on_program_start)
    parts = _collect_generations(config, agent, folders, looking)
    generation = parts[agent]
    frozen = [entry for has in parts.values() for entry in _executable_entries(has)]
    to_build = [one.tool for one in frozen if isinstance(one.tool, PerCallExecutableTool) and one.tool.spec.build]
    with tempfile.TemporaryDirectory(prefix="handrail-build-") as temporary:
        room = Path(os.path.realpath(temporary))
        room.chmod(0o711)  # a sandbox may run as another user
        sources = build_tool_executables(to_build, sandbox, room, write)
        made = _write_bundle(target, config, agent, parts, sources)
    hashes = {name: {e.id: e.definition_hash for e in has.entries.values()} for name, has in parts.items()}
    text = format_bundle_json(agent, version("handrail"), made, hashes)
    (target / BUNDLE_FILE).write_text(text, encoding="utf-8")
    (target / BUNDLE_FILE).chmod(0o644)
    return AgentBundle(
        target,
        agent,
        hash_file_for_seal(target / BUNDLE_FILE).sha256,
        tuple(sorted(made)),
        tuple(name for name in parts if name != agent),
        tuple(dict.fromkeys(entry.id for entry in frozen)),
        tuple(entry.id for entry in generation.entries.values() if not isinstance(entry.tool, PerCallExecutableTool)),
        _find_unresolved_reasons(generation),
        tuple(dict.fromkeys(tool.spec.id for tool in to_build)),
    )


def _check_target(target: Path) -> None:
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target} already exists and is not empty. Choose another folder with --out, or remove it.")


def _collect_generations(
    config: MergedConfiguration, agent: str, folders: StateFolders, confinement: ToolConfinement
) -> dict[str, Generation]:
    """Return the tools of an agent and of all agents that it can delegate to, by agent id.

    The default agent needs no manifest. Without one, it works with the tools of the bundle.

    :raises LoadError: with all faults of all agents
    """
    found: dict[str, Generation] = {}
    faults: list[Diagnostic] = []
    everybody = {one.manifest.id: one for one in iterate_agents(config, folders)}
    wanted = [agent]
    while wanted:
        if (name := wanted.pop(0)) in found:
            continue
        loaded = everybody.get(name) or load_agent(config, name, folders)
        sources = make_tool_sources(
            config, loaded.checked_agent, folders, confinement, make_placeholder_secrets(config)
        )
        generation, _, problems = load_tools_and_rules(sources, 1, loaded)
        faults += problems
        if generation is None:
            continue
        found[name] = generation
        wanted += (i.removeprefix(AGENT_TOOL_PREFIX) for i in generation.entries if i.startswith(AGENT_TOOL_PREFIX))
        if TASK_TOOL in generation.entries:
            wanted += [i for i, one in everybody.items() if one.manifest.accepts_delegation_from(loaded.manifest)]
        wanted = [i for i in wanted if i != DEFAULT_AGENT or _manifest_path(config, i).exists()]
    if faults:
        raise LoadError(list(dict.fromkeys(faults)))
    return found


def _executable_entries(generation: Generation) -> Iterator[ToolEntry]:
    return (entry for entry in generation.entries.values() if isinstance(entry.tool, PerCallExecutableTool))


def _manifest_path(config: MergedConfiguration, agent: str) -> Path:
    return config.folder / "agents" / agent / AGENT_FILE


def _find_unresolved_reasons(generation: Generation) -> dict[str, str]:
    """Return why tools are unavailable, without the reasons that a build has resolved."""
    return {
        i: reason
        for i, entry in generation.entries.items()
        if (reason := entry.unavailable_reason) is not None and reason != NOT_BUILT
    }


def _write_bundle(
    target: Path, config: MergedConfiguration, agent: str, parts: dict[str, Generation], sources: Mapping[str, Path]
) -> dict[str, SealedFile]:
    """Write the files of a bundle, and return their seals.

    :param sources: the built copies, by the original folder of the tool
    """
    target.mkdir(parents=True, exist_ok=True)
    target.chmod(0o755)
    wanted = _collect_files(config, parts, sources)
    for name, path in wanted.items():
        to = target / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
        to.chmod(0o755 if path.stat().st_mode & 0o111 else 0o644)
    for folder, _, _ in os.walk(target):
        Path(folder).chmod(0o755)
    settings = target / FILE_NAME
    settings.write_text(_make_bundle_config(config, agent), encoding="utf-8")
    settings.chmod(0o644)
    return {name: hash_file_for_seal(target / name) for name in (*wanted, FILE_NAME)}


def _collect_files(
    config: MergedConfiguration, parts: Mapping[str, Generation], sources: Mapping[str, Path]
) -> dict[str, Path]:
    """Return the files of a bundle by their paths in it, each with the path that it is copied from."""
    wanted: dict[str, Path] = {}
    for of, generation in parts.items():
        (_, everybody), (_, own) = config.list_tool_folders(of)
        places = [(Path(os.path.realpath(everybody)), "tools"), (Path(os.path.realpath(own)), f"agents/{of}/tools")]
        for entry in _executable_entries(generation):
            for real, name in places:
                if Path(entry.source).parent == real:
                    wanted |= {f"{name}/{file}": path for file, path in _list_tool_files(entry, real, sources).items()}
        for real, name in places:
            wanted |= {f"{name}/{path.relative_to(real)}": path for path in _iterate_resource_files(real)}
        if of != DEFAULT_AGENT or _manifest_path(config, of).exists():
            wanted[f"agents/{of}/{AGENT_FILE}"] = _manifest_path(config, of)
    if any(SKILL_TOOL in generation.entries for generation in parts.values()):
        wanted |= {
            f"skills/{path.relative_to(config.folder / 'skills')}": path
            for path in _iterate_operator_skills(config.folder)
        }
    return wanted


def _list_tool_files(entry: ToolEntry, folder: Path, sources: Mapping[str, Path]) -> dict[str, Path]:
    """Return the files of a tool by their paths in ``folder``.

    These are its manifest, its program with its folder, and the modules next to its module.
    """
    tool = entry.tool
    assert isinstance(tool, PerCallExecutableTool)
    found = [Path(entry.source)]
    if (own := Path(tool.folder)) == folder:
        found.append(Path(tool.executable))
    if isinstance(tool, PerCallModuleTool):
        found += (path for path in sorted(folder.glob("*.py")) if not path.stat().st_mode & 0o111)
    wanted = {str(path.relative_to(folder)): path for path in found}
    if own != folder:
        there = sources.get(tool.folder, own)
        for parent, _, names in os.walk(there):
            for name in names:
                path = Path(parent) / name
                if not Path(os.path.realpath(path)).is_relative_to(there):
                    raise UsageError(
                        f"{path} is a link to a file outside the tool's folder. Put the file itself there."
                    )
                wanted[f"{own.relative_to(folder)}/{path.relative_to(there)}"] = path
    return wanted


def _iterate_operator_skills(config: Path) -> Iterator[Path]:
    """Yield the files of the operator's skills, without links.

    Links are never followed when skills are read.
    """
    for folder in sorted((config / "skills").glob("*/")):
        if not folder.is_symlink() and (folder / SKILL_FILE).is_file():
            for parent, _, names in os.walk(folder):
                files = (Path(parent) / name for name in sorted(names))
                yield from (path for path in files if path.is_file() and not path.is_symlink())


def _iterate_resource_files(folder: Path) -> Iterator[Path]:
    """Yield the file with a folder's resources and prompts, and the files that it names."""
    file = folder / RESOURCES_FILE
    if file.exists():
        yield file
        offering = parse_resources(
            read_file_within_limit(file, MAX_RESOURCES_FILE_BYTES), str(file), folder, read_file_within_limit
        )
        yield from (folder / name for name in offering.files)


def _make_bundle_config(config: MergedConfiguration, agent: str) -> str:
    """Return the text of the configuration with this agent as the default agent.

    :raises UsageError: if the line that sets another agent cannot be identified
    """
    text = decode_settings_text(config.file.read_bytes()) if config.file is not None and config.file.exists() else ""
    fields = tomllib.loads(text)
    if "agent" in fields:
        del fields["agent"]
        cut = (text[: line.start()] + text[line.end() :] for line in _AGENT_KEY.finditer(text))
        if (rest := next((one for one in cut if _parses_to(one, fields)), None)) is None:
            raise UsageError(f'Cannot replace `agent` in {config.file}. Write it on a separate line: agent = "{agent}"')
        text = rest
    return f'agent = "{agent}"\n{text}'


def _parses_to(text: str, fields: dict[str, Any]) -> bool:
    try:
        return tomllib.loads(text) == fields
    except tomllib.TOMLDecodeError:
        return False
