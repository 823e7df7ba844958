"""What a call locks: a tool's lock templates, filled from its arguments, as canonical resources.

- ``workspace`` is the root of every ``file:`` resource in the workspace, and in the agent's further roots that may be
  written: what locks the workspace as a whole (``bash``) may write there too;
- ``file:<path>`` elsewhere (a session's output, a read-only root) stands under a root of its own;
- every other template is one resource by itself, independent of the rest: ``memory``, ``account:alice``.

Two spellings of one file are one resource, since paths are located before they become one.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol, cast

from handrail.arbiter.locks.table import Resource, Want
from handrail.contract.errors import ToolError
from handrail.contract.text.json import json_type
from handrail.contract.tool.spec import LockMode, LockSpec, ToolSpec, fill, placeholders

WORKSPACE = "workspace"
ELSEWHERE = "file:/"
"""The root of files outside the workspace. No template can be this by itself, so no other root meets it."""

MAX_RESOURCES = 10_000
"""How many resources one template may stand for in one call."""

MAX_BITS = 4096
"""The longest integer that names a resource; Python refuses to write out much longer ones."""

_FILE = "file:"


class Places(Protocol):
    """The part of :class:`~handrail.runtime.files.roots.Roots` that is needed here."""

    workspace: str
    """The workspace's canonical folder."""

    @property
    def writable(self) -> Collection[str]:
        """The canonical folders that may be written, the workspace among them."""
        ...

    def absolute(self, path: str) -> str:
        """The file's canonical path: no ``..``, no link, no doubled separator.

        :raises ToolError: for text that can name no file
        """
        ...


class Resources:
    """Fills the lock templates of tools. One for a kernel; it remembers what it compiled."""

    __slots__ = ("_compiled",)

    def __init__(self) -> None:
        # By identity, which is quicker than hashing a whole spec; the entry goes with the spec, before another has its id.
        self._compiled: dict[int, tuple[weakref.ref[ToolSpec], Templates]] = {}

    def wants(
        self, spec: ToolSpec, arguments: Mapping[str, Any], places: Places, *, background: bool = False
    ) -> tuple[Want, ...]:
        """What a call of ``spec`` with validated ``arguments`` has to hold.

        :param background: what it has to hold where nobody waits for it
        :raises ToolError: ``invalid_input`` when an argument cannot be made a resource
        """
        if background:
            return Templates(spec.background_locks).wants(arguments, places)
        key = id(spec)
        found = self._compiled.get(key)
        if found is None:
            gone = weakref.ref(spec, lambda _, compiled=self._compiled: compiled.pop(key, None))
            found = self._compiled[key] = (gone, Templates(spec.effective_locks))
        templates = found[1]
        return templates.wants(arguments, places) if templates.filled else templates.constant


def shared(wants: tuple[Want, ...]) -> tuple[Want, ...]:
    """The locks of a call that runs read-only: files are looked at beside others who look."""
    return tuple((resource, "S" if resource[0] in (WORKSPACE, ELSEWHERE) else mode) for resource, mode in wants)


class _Template:
    """One with places to fill, or a file's name. Most have a single place, which is filled with a text."""

    __slots__ = ("_after", "_before", "_name", "_whole", "lock")

    def __init__(self, lock: LockSpec) -> None:
        self.lock = lock
        names = lock.arguments
        self._whole = () if names else (fill(lock.resource, {}),)
        self._name = names[0] if len(names) == 1 else ""
        self._before, _, self._after = fill(lock.resource, {self._name: "\0"}).partition("\0")

    def filled(self, arguments: Mapping[str, Any]) -> Iterable[str]:
        """The resources that it stands for.

        :raises ToolError: ``invalid_input`` when an argument cannot be made a resource
        """
        if self._whole:
            return self._whole
        value = arguments.get(self._name)
        if type(value) is str and self._name:
            return (self._before + value + self._after,)
        return [fill(self.lock.resource, values) for values in _spread(self.lock, arguments)]


class Templates:
    """The lock templates of one tool, taken apart once."""

    __slots__ = ("constant", "filled")

    def __init__(self, locks: tuple[LockSpec, ...]) -> None:
        constant: list[Want] = []
        self.filled: list[_Template] = []
        for lock in locks:
            # A file's name is located anew for each call, since links change.
            if lock.resource.startswith(_FILE) or placeholders(lock.resource):
                self.filled.append(_Template(lock))
            else:
                constant.append(((lock.resource,), lock.mode))
        self.constant = tuple(constant)

    def wants(self, arguments: Mapping[str, Any], places: Places) -> tuple[Want, ...]:
        """See :meth:`Resources.wants`."""
        wants = dict.fromkeys(self.constant)
        for template in self.filled:
            mode = template.lock.mode
            for resource in template.filled(arguments):
                if resource.startswith(_FILE):
                    for want in _file(resource[len(_FILE) :], mode, places):
                        wants[want] = None
                else:
                    wants[(resource,), mode] = None
        return tuple(wants)


def _file(path: str, mode: LockMode, places: Places) -> list[Want]:
    """The resource of one file. No path (an optional argument that was left out) is the whole workspace."""
    if not path:
        return [((WORKSPACE,), mode)]
    absolute, workspace = places.absolute(path), places.workspace
    if absolute == workspace:
        return [((WORKSPACE,), mode)]
    if absolute.startswith(workspace.rstrip("/") + "/"):
        return [(_beneath(WORKSPACE, absolute[len(workspace.rstrip("/")) :]), mode)]
    if any(absolute == root or absolute.startswith(root + "/") for root in places.writable):
        return [(_beneath(WORKSPACE, absolute, "/"), mode)]  # no name in the workspace is "/"
    wants: list[Want] = [(_beneath(ELSEWHERE, absolute), mode)]
    folder = absolute.rstrip("/") + "/"
    if any(root.startswith(folder) for root in places.writable):  # a folder that holds such a root covers it too
        wants.append(((WORKSPACE,), mode))
    return wants


def _beneath(root: str, path: str, *first: str) -> Resource:
    return (root, *first, *(part for part in path.split("/") if part))


def _spread(lock: LockSpec, arguments: Mapping[str, Any]) -> list[dict[str, str]]:
    """The texts to fill in. A list stands for one resource per item, an empty one for an argument left out."""
    spread: list[dict[str, str]] = [{}]
    for name in dict.fromkeys(lock.arguments):
        value = arguments.get(name)
        items: list[object] = [value]
        if isinstance(value, (list, tuple)):
            items = list(cast("list[object]", value)) or [None]
        texts = dict.fromkeys(_text(lock, name, item) for item in items)
        if len(spread) * len(texts) > MAX_RESOURCES:
            raise ToolError(
                f"the tool's lock {lock} stands for more than {MAX_RESOURCES:,} resources with these arguments; pass fewer at once",
                kind="invalid_input",
            )
        spread = [{**filled, name: text} for filled in spread for text in texts]
    return spread


def _text(lock: LockSpec, name: str, value: object) -> str:
    """One spelling for one value: 5 and 5.0 are the same JSON number."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, (str, float)) or (isinstance(value, int) and value.bit_length() <= MAX_BITS):
        return str(value)
    raise ToolError(
        f"the argument {name!r} is a JSON {json_type(value)}, and the tool's lock {lock} needs a text, a number or a list of them",
        kind="invalid_input",
    )
