"""An agent with its tools, frozen: ``handrail build AGENT``.

The bundle is a configuration folder that needs no other: the agent's manifest, its settings, and the manifests, modules and
programs of the tools that it has, overrides resolved, each file by its hash. Whatever reads it checks the hashes first. What
the agent has beside that, built-ins and the tools of installed packages, comes with Handrail and those packages wherever
the bundle is started, and is named in it by definition.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from handrail.agents import appoint, as_configured, equipped, sources_of
from handrail.authoring.linting import nothing_runs
from handrail.config import FILE_NAME, Configuration
from handrail.contract.agent import DEFAULT_AGENT
from handrail.contract.errors import LoadError, UsageError
from handrail.contract.sandbox import Sandbox
from handrail.registry.agents import AGENT_FILE
from handrail.registry.bundles import BUNDLE_FILE, Sealed, seal_of, sealed_text
from handrail.registry.generation import Entry, Generation
from handrail.registry.sources.executables import Confinement, ExecutableTool
from handrail.registry.sources.folders import content_of
from handrail.registry.sources.modules import ModuleTool
from handrail.registry.sources.own_offering import MAX_OFFERING_BYTES, OFFERING_FILE, read_offering
from handrail.store.folders import Folders

_AGENT_KEY = re.compile(r"^agent\s*=.*$", re.MULTILINE)
_TABLE = re.compile(r"^\[", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Bundle:
    """What was built.

    :param hash: SHA-256 of its own file, which holds those of all others
    :param tools: ids of the tools that are frozen in it
    :param beside: ids of those that come with Handrail and installed packages
    :param withheld: ids that could not run on this machine, with the reason
    """

    folder: Path
    agent: str
    hash: str
    files: tuple[str, ...]
    tools: tuple[str, ...]
    beside: tuple[str, ...]
    withheld: dict[str, str]


def build(config: Configuration, agent: str, folders: Folders, sandbox: Sandbox, target: Path) -> Bundle:
    """Check an agent whole, and freeze it into ``target``, which must not exist or be empty.

    :raises UsageError: when there is no such agent, or something in the way
    :raises LoadError: with every fault of the agent, its tools and rules
    :raises OSError: when ``target`` cannot be written
    """
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target} is there already; name another with --out, or take it away")
    appointed = appoint(config, agent, folders)
    (_, everybody), (_, of_agent) = config.tool_folders(agent)
    confinement = Confinement(sandbox, nothing_runs, nothing_runs)
    sources = sources_of(config, appointed.checked, folders, confinement, as_configured(config))
    generation, _, faults = equipped(sources, 1, appointed)
    if faults or generation is None:
        raise LoadError(faults)
    frozen = {tool_id: entry for tool_id, entry in generation.entries.items() if isinstance(entry.tool, ExecutableTool)}
    made = _written(target, config, agent, frozen.values(), (everybody, of_agent))
    text = sealed_text(agent, version("handrail"), made, {e.id: e.definition_hash for e in generation.entries.values()})
    (target / BUNDLE_FILE).write_text(text, encoding="utf-8")
    (target / BUNDLE_FILE).chmod(0o644)
    return Bundle(
        target,
        agent,
        seal_of(target / BUNDLE_FILE).sha256,
        tuple(sorted(made)),
        tuple(frozen),
        tuple(tool_id for tool_id in generation.entries if tool_id not in frozen),
        _withheld(generation),
    )


def _withheld(generation: Generation) -> dict[str, str]:
    return {tool_id: entry.withheld for tool_id, entry in generation.entries.items() if entry.withheld is not None}


def _written(
    target: Path, config: Configuration, agent: str, entries: Iterable[Entry], tool_folders: tuple[Path, Path]
) -> dict[str, Sealed]:
    target.mkdir(parents=True, exist_ok=True)
    target.chmod(0o755)
    names = ("tools", f"agents/{agent}/tools")
    wanted: dict[str, Path] = {}
    for entry in entries:
        for folder, name in zip(tool_folders, names, strict=True):
            real = Path(os.path.realpath(folder))
            if Path(entry.source).parent == real:
                wanted |= {f"{name}/{path.relative_to(real)}": path for path in _files_of(entry, real)}
    for folder, name in zip(tool_folders, names, strict=True):
        real = Path(os.path.realpath(folder))
        wanted |= {f"{name}/{path.relative_to(real)}": path for path in _offered(real)}
    manifest = config.folder / "agents" / agent / AGENT_FILE
    if agent != DEFAULT_AGENT or manifest.exists():
        wanted[f"agents/{agent}/{AGENT_FILE}"] = manifest
    for name, path in wanted.items():
        to = target / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
        to.chmod(0o755 if path.stat().st_mode & 0o111 else 0o644)
    for folder, _, _ in os.walk(target):
        Path(folder).chmod(0o755)
    settings = target / FILE_NAME
    settings.write_text(_settings(config, agent), encoding="utf-8")
    settings.chmod(0o644)
    return {name: seal_of(target / name) for name in (*wanted, FILE_NAME)}


def _files_of(entry: Entry, folder: Path) -> Iterator[Path]:
    """What a tool is made of: its manifest, its program with the folder that this has of its own, its module's neighbours."""
    tool = entry.tool
    assert isinstance(tool, ExecutableTool)
    yield Path(entry.source)
    own = Path(tool.folder)
    if own == folder:
        yield Path(tool.executable)
    else:
        for parent, _, names in os.walk(own):
            for name in names:
                path = Path(parent) / name
                if not Path(os.path.realpath(path)).is_relative_to(own):
                    raise UsageError(f"{path} leads out of the tool's own folder; put the file itself there")
                yield path
    if isinstance(tool, ModuleTool):
        yield from (path for path in sorted(folder.glob("*.py")) if not path.stat().st_mode & 0o111)


def _offered(folder: Path) -> Iterator[Path]:
    """The folder's resources and prompts, and the files that these name."""
    file = folder / OFFERING_FILE
    if file.exists():
        yield file
        offering = read_offering(content_of(file, MAX_OFFERING_BYTES), str(file), folder, content_of)
        yield from (folder / name for name in offering.files)


def _settings(config: Configuration, agent: str) -> str:
    """The configuration's text with this agent as the one that sessions have."""
    text = config.file.read_text(encoding="utf-8") if config.file is not None and config.file.exists() else ""
    tables = _TABLE.search(text)
    head, rest = (text, "") if tables is None else (text[: tables.start()], text[tables.start() :])
    return f'agent = "{agent}"\n{_AGENT_KEY.sub("", head)}{rest}'
