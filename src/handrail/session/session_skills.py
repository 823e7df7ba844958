"""The skills of one session: found on first use and fixed from then on. Each is given to the model once."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import cast

from handrail.contract.errors import ToolError
from handrail.contract.services.history_and_skill_services import SkillInfo, SkillInstructions, SkillLayer
from handrail.contract.session_protocols import SessionValueStore
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.neutralisation import neutralise_text
from handrail.contract.text.text_encodings import decode_settings_text
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names
from handrail.registry.sources.tool_folder_source import explain_unsafe_permissions
from handrail.session.instruction_files import iterate_parent_repository_folders

# ``SKILL.md`` files: the folders that are searched, and the content that is read.
#
# Files in a workspace may be hostile: an invalid name, a file of a terabyte, a FIFO, a link to another place. Each folder
# on the way is opened separately, and no link is followed.

SHIPPED = Path(__file__).parent / "shipped_skills"
FILE = "SKILL.md"
MAX_BYTES = 256 * 1024
MAX_SKILLS = 200
"""The most skills of one folder. Further ones are ignored."""
MAX_DESCRIPTION = 1_024
MAX_FILES = 50
_IN_WORKSPACE = ((".agents", "skills"), (".claude", "skills"))
_NAME = compile_regex_lazily(r"[a-z0-9][a-z0-9-]{0,63}\Z")
_KEY = compile_regex_lazily(r"([A-Za-z][A-Za-z0-9_-]*):(?:[ \t]+(.*)|)\Z")
_KNOWN_FIELDS = ("name", "description", "license", "version", "metadata", "compatibility", "author")
_GRANTING_FIELDS = ("allowed-tools", "allowed_tools", "tools", "permissions", "hooks", "model")


class SkillFolder(Struct, frozen=True):
    """A folder of skills.

    :param base: canonical; the folders below it are opened one by one
    """

    layer: SkillLayer
    base: Path
    subfolders: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return self.base.joinpath(*self.subfolders)


class FoundSkill(Struct, frozen=True):
    """A skill with its folder and the hash of its file."""

    skill: SkillInfo
    skill_folder: SkillFolder
    folder: str
    sha256: str = ""


def list_skill_folders(workspace: Path, config: Path) -> list[SkillFolder]:
    """Return the folders that are searched for skills, the nearest first.

    They are in the workspace, in the folders above it up to the top of its repository, in the operator's configuration and
    in the package.
    """
    found = [
        SkillFolder("workspace", folder, below)
        for folder in iterate_parent_repository_folders(workspace)
        for below in _IN_WORKSPACE
    ]
    return [*found, SkillFolder("user", config, ("skills",)), SkillFolder("shipped", SHIPPED)]


def find_skills(workspace: Path, config: Path) -> list[FoundSkill]:
    """Return all skills, including those that are invalid or hidden by a nearer skill."""
    nearer: dict[str, str] = {}
    found: list[FoundSkill] = []
    for layer in list_skill_folders(workspace, config):
        for one in _find_in_folder(layer):
            skill = one.skill
            if not skill.problem and (other := nearer.setdefault(skill.name, skill.path)) != skill.path:
                skill = replace(skill, shadowed_by=other)
            found.append(replace(one, skill=skill))
    return found


def read_skill(found: FoundSkill) -> tuple[str, str, tuple[str, ...]]:
    """Return the instructions of a skill, the hash of its file, and the other files in its folder.

    :raises ValueError: if it cannot be read; the text says why
    """
    content = _read_skill_file(found.skill_folder, found.folder)
    _, body, _ = _parse_skill(content)
    return body, hashlib.sha256(content).hexdigest(), tuple(_iterate_skill_files(found.skill_folder, found.folder))


def _find_in_folder(layer: SkillFolder) -> Iterator[FoundSkill]:
    try:
        folder = _open_without_links(layer)
    except OSError:
        return
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - by its descriptor
    except OSError:
        return
    finally:
        os.close(folder)
    count = 0
    for name in names:
        if name.startswith("."):
            continue
        if (found := _inspect_skill(layer, name)) is None:
            continue
        if (count := count + 1) > MAX_SKILLS:
            problem = f"{layer.folder} contains more than {MAX_SKILLS} skills. The further ones are ignored."
            yield FoundSkill(_faulty_skill(layer, name, problem), layer, name)
            return
        yield found


def _inspect_skill(layer: SkillFolder, name: str) -> FoundSkill | None:
    """Return the skill in a folder, or None if the name is not a folder."""
    try:
        if not stat.S_ISDIR((layer.folder / name).lstat().st_mode) and not (layer.folder / name).is_symlink():
            return None
    except (OSError, ValueError):
        return None
    if not _NAME.match(name):
        problem = f"The name is invalid: {name[:80]!r}. Use at most 64 lower-case letters, digits and '-'."
        return FoundSkill(_faulty_skill(layer, name, problem), layer, name)
    try:
        content = _read_skill_file(layer, name)
        front, _, notes = _parse_skill(content)
    except ValueError as error:
        return FoundSkill(_faulty_skill(layer, name, str(error)), layer, name)
    if (given := front.get("name", name)) != name:
        problem = (
            f"The front matter has the name {given[:80]!r}, but the folder is {name!r}. Use the same name for both."
        )
        return FoundSkill(_faulty_skill(layer, name, problem), layer, name)
    place = str(layer.folder / name / FILE)
    skill = SkillInfo(name, front["description"], layer.layer, place, notes)
    return FoundSkill(skill, layer, name, hashlib.sha256(content).hexdigest())


def _faulty_skill(layer: SkillFolder, name: str, problem: str) -> SkillInfo:
    shown = name.encode("utf-8", "backslashreplace").decode()[:80]
    return SkillInfo(shown, "", layer.layer, str(layer.folder / shown / FILE), problem=problem)


def _open_without_links(layer: SkillFolder, *below: str) -> int:
    """Open a folder below a skill folder and return its descriptor. No part below the base may be a link.

    :raises OSError: if it does not exist
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    folder = os.open(layer.base, flags)
    for part in (*layer.subfolders, *below):
        try:
            inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
        folder = inner
    return folder


def _read_skill_file(layer: SkillFolder, name: str) -> bytes:
    """Read the SKILL.md file of a skill.

    :raises ValueError: if it is not a regular file, or is too large
    """
    try:
        if layer.layer == "user" and (
            problem := explain_unsafe_permissions(layer.folder) or explain_unsafe_permissions(layer.folder / name)
        ):
            raise ValueError(problem)
        folder = _open_without_links(layer, name)
        try:
            file = os.open(FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
    except FileNotFoundError:
        raise ValueError(f"{FILE} is missing. Create the file or remove the folder.") from None
    except OSError as error:
        linked = (layer.folder / name).is_symlink() or (layer.folder / name / FILE).is_symlink()
        text = f"{FILE} or its folder is a link. Replace it with the file itself."
        raise ValueError(text if linked else f"{FILE} cannot be read: {error.strerror or error}.") from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):  # checked first, because os.fdopen raises for a folder
            raise ValueError(f"{FILE} is not a regular file.")
        with os.fdopen(file, "rb", closefd=False) as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{FILE} cannot be read: {error.strerror or error}.") from None
    finally:
        os.close(file)
    if len(content) > MAX_BYTES:
        raise ValueError(
            f"{FILE} is larger than {MAX_BYTES // 1024} KiB. Move the rest into other files of the folder."
        )
    return content


def _parse_skill(content: bytes) -> tuple[dict[str, str], str, tuple[str, ...]]:
    """Return the front matter, the body, and notes on fields without effect.

    Only the part of YAML that skills use is read: texts, with or without quotes, on one line or as a block.

    :raises ValueError: if the file is invalid; the text says why
    """
    try:
        text = decode_settings_text(content)
    except UnicodeDecodeError as error:
        raise ValueError(f"{FILE} is not UTF-8 text: the byte at {error.start} is invalid.") from None
    lines = text.replace("\r\n", "\n").split("\n")
    if lines[0].rstrip() != "---":
        raise ValueError(
            f"{FILE} has no front matter. Begin it with a line ---, then name: and description:, then a line ---."
        )
    end = next((n for n, line in enumerate(lines[1:], 1) if line.rstrip() in ("---", "...")), None)
    if end is None:
        raise ValueError("The front matter has no end. Write a line --- after it.")
    front = _parse_front_matter(lines[1:end])
    description = " ".join(front.get("description", "").split())
    if not description:
        raise ValueError("The front matter has no `description`. Say in one or two sentences when to use the skill.")
    if len(description) > MAX_DESCRIPTION:
        raise ValueError(f"`description` has {len(description):,} characters. The maximum is {MAX_DESCRIPTION:,}.")
    front["description"] = neutralise_text(description)
    notes = [
        f"{key} has no effect: a skill grants no permissions"
        if key.lower() in _GRANTING_FIELDS
        else f"{key} has no effect"
        + (f"; did you mean {close[0]}?" if (close := nearest_names(key, _KNOWN_FIELDS, 1)) else "")
        for key in front
        if key not in _KNOWN_FIELDS
    ]
    return front, "\n".join(lines[end + 1 :]).strip("\n"), tuple(notes)


def _parse_front_matter(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    at = 0
    while at < len(lines):
        line, at = lines[at], at + 1
        if (matched := _KEY.match(line.rstrip())) is None:
            if line.strip() and not line.startswith((" ", "\t", "#", "-")):
                raise ValueError(f"A line of the front matter is invalid: {line[:60]!r}. Expected KEY: TEXT.")
            continue
        key, value = matched[1], (matched[2] or "").strip()
        if key in found:
            raise ValueError(f"The front matter contains `{key}` twice. Remove one.")
        inner: list[str] = []
        while at < len(lines) and (not lines[at].strip() or lines[at].startswith((" ", "\t"))):
            inner.append(lines[at].strip())
            at += 1
        if value in ("|", ">", "|-", ">-", "|+", ">+", "") or (inner and key in ("name", "description")):
            value = " ".join([*([] if value[:1] in ("|", ">") else [value]), *inner])
        found[key] = _unquote(key, value.strip())
    return found


def _unquote(key: str, value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] == "'":
        return value[1:-1].replace("''", "'")
    if len(value) > 1 and value[0] == value[-1] == '"':
        return value[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    if key in ("name", "description") and value[:1] in ("&", "*", "!", "{", "[", "%", "@", "`", '"', "'"):
        raise ValueError(f"`{key}` in the front matter is not plain text. Put it between quotes.")
    return value.split(" #")[0].rstrip()


def _iterate_skill_files(layer: SkillFolder, name: str) -> Iterator[str]:
    """Yield up to ``MAX_FILES`` files in a skill's folder and its subfolders, as relative paths."""
    top = layer.folder / name
    count = 0
    for folder in (top, *sorted(f for f in _list_entries(top) if f.is_dir() and not f.is_symlink())):
        for entry in sorted(_list_entries(folder)):
            if entry == top / FILE or entry.is_symlink() or not entry.is_file():
                continue
            if (count := count + 1) > MAX_FILES:
                return
            yield str(entry.relative_to(top))


def _list_entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


_GIVEN_VALUE = ("skill", "given")
"""The tool and the key under which a session stores the names of loaded skills."""
_MOST_NAMED = 30


class SessionSkills:
    """The skills of one session.

    Implements :class:`~handrail.contract.services.history_and_skill_services.SkillService`.

    :param config: the operator's configuration folder
    :param values: stores the names of loaded skills
    """

    def __init__(self, session_id: str, workspace: str, config: Path, values: SessionValueStore) -> None:
        self._session_id = session_id
        self._workspace = workspace
        self._config = config
        self._values = values

    @cached_property
    def _usable_skills(self) -> Mapping[str, FoundSkill]:
        found = find_skills(Path(self._workspace), self._config)
        return {one.skill.name: one for one in found if one.skill.is_usable}

    @property
    def readable_skills(self) -> Sequence[SkillInfo]:
        return tuple(one.skill for one in self._usable_skills.values())

    async def list_skills(self) -> Sequence[SkillInfo]:
        return self.readable_skills

    async def load_skill(self, name: str) -> SkillInstructions:
        if (found := self._usable_skills.get(name)) is None:
            raise ToolError(self._unknown_skill_text(name), kind="invalid_input")
        kept: object = await self._values.get(self._session_id, *_GIVEN_VALUE)
        given = cast("list[object]", kept) if isinstance(kept, list) else []
        if name in given:
            return SkillInstructions(found.skill, "", was_given=True)
        try:
            body, sha256, files = read_skill(found)
        except ValueError as error:
            text = f"Skill {name!r} can no longer be read: {error} Ask the user to fix it, or continue without it."
            raise ToolError(text, kind="unavailable") from None
        await self._values.put(self._session_id, *_GIVEN_VALUE, [*given, name])
        return SkillInstructions(
            found.skill, body, self._readable_files(found, files), has_changed=sha256 != found.sha256
        )

    async def reset_loaded_skills(self) -> None:
        """Let each skill be loaded again, because the conversation no longer contains it."""
        await self._values.put(self._session_id, *_GIVEN_VALUE, None)

    def _readable_files(self, found: FoundSkill, files: Sequence[str]) -> tuple[str, ...]:
        """Return the skill's files that the session's tools can read, relative to the workspace."""
        folder = found.skill_folder.folder / found.folder
        if found.skill.layer != "workspace" or not folder.is_relative_to(self._workspace):
            return ()
        return tuple(str(folder.relative_to(self._workspace) / file) for file in files)

    def _unknown_skill_text(self, name: str) -> str:
        names = list(self._usable_skills)
        close = nearest_names(name, names, 2)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return f"Skill {name[:80]!r} does not exist.{hint} Skills: {', '.join(names[:_MOST_NAMED]) or 'none'}{more}."
