"""Entry points of installed Python packages, read again only after a package was installed, changed or removed.

Without a cache, the standard library reads a file of every package in the environment on each query, which took longer than
any other part of opening a kernel. Names, times and sizes show whether the result would be the same again.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.machinery import PathFinder

from handrail.contract.struct import Struct, field
from handrail.origins.import_guard import is_entry_point_inside
from handrail.origins.program_lookup import list_open_workspaces

_OWN_GROUP = re.compile(rb"^\s*\[+handrail\.", re.MULTILINE)


class _EntryPointCache(Struct, frozen=True):
    seen: tuple[object, ...]
    select: Callable[..., metadata.EntryPoints]
    groups: dict[str, metadata.EntryPoints] = field(default_factory=dict[str, metadata.EntryPoints])


_last: _EntryPointCache | None = None


def list_entry_points_outside_workspaces(group: str) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points of a group, without those of packages in an open workspace.

    :param group: begins with ``handrail.``
    """
    global _last
    seen = _package_stamps()
    if (looked := _last) is None or looked.seen != seen:
        found = metadata.entry_points() if _may_have_entry_points() else metadata.EntryPoints()
        _last = looked = _EntryPointCache(seen, found.select)
    if group not in looked.groups:
        looked.groups[group] = looked.select(group=group)
    folders = list_open_workspaces()
    return tuple(point for point in looked.groups[group] if not is_entry_point_inside(point, folders))


def _package_stamps() -> tuple[object, ...]:
    """Return what the result depends on: the finders, the search path, and each package's list."""
    found: list[object] = [tuple(map(id, sys.meta_path))]
    for place in sys.path:
        try:
            with os.scandir(place or ".") as entries:
                packages = [entry for entry in entries if entry.name.lower().endswith((".dist-info", ".egg-info"))]
        except OSError:
            found.append((place, _list_stamp(place)))  # an archive, or nothing
            continue
        lists = ((entry.name, _list_stamp(f"{entry.path}/entry_points.txt")) for entry in packages)
        found.append((os.path.abspath(place), *lists))  # noqa: PTH100 - does not resolve links
    return tuple(found)


def _may_have_entry_points() -> bool:
    """Return whether a package may have entry points for Handrail.

    Most environments have none. Then one look at each list replaces the standard library's search, which also reads the
    description of each package.
    """
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return True
    for place in sys.path:
        try:
            with os.scandir(place or ".") as entries:
                packages = [entry.path for entry in entries if entry.name.lower().endswith((".dist-info", ".egg-info"))]
        except NotADirectoryError:
            return True  # an archive
        except OSError:
            continue
        for package in packages:
            try:
                with open(f"{package}/entry_points.txt", "rb") as file:  # noqa: PTH123 - as many as there are packages
                    if _OWN_GROUP.search(file.read()) is not None:
                        return True
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                return True
    return False


def _list_stamp(path: str) -> tuple[int, int, int] | None:
    try:
        about = os.stat(path)  # noqa: PTH116 - a hundred and more of them, at each start
    except OSError:
        return None
    return about.st_ino, about.st_mtime_ns, about.st_size
