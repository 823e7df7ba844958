"""Which engine opens a workspace's database: Python's own SQLite, or one that an installed package offers in its place.

A package offers one by the entry point group ``handrail.stores``: a function with the parameters of
:func:`sqlite3.connect`, which gives a connection of SQLite's own that is set up in its way, say with the key of an
encrypted file or a file system of its own. An operator chooses it by name (``[state] store``) for the workspaces
that have no state yet. Its name is kept beside the database, so that whoever opens it later, be it only to look, does
so in the same way.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from handrail.contract.errors import StartError
from handrail.origins.imports import entry_points
from handrail.store import private
from handrail.store.folders import unwritable

if TYPE_CHECKING:
    from importlib import metadata

GROUP = "handrail.stores"
OWN = "sqlite"
"""The name of SQLite as Python has it."""
_MOST_BYTES = 200

Engine = Callable[..., sqlite3.Connection]
"""Called as :func:`sqlite3.connect` is."""


def installed() -> Iterable[metadata.EntryPoint]:
    """What the packages in this environment offer."""
    return entry_points(GROUP)


def connected(path: Path, database: str | Path, **options: Any) -> sqlite3.Connection:
    """A connection to the database in the file ``path``, by the engine that has made it.

    :param database: as :func:`sqlite3.connect` takes it, with its ``options``
    :raises sqlite3.Error: when it cannot be opened
    :raises StartError: when its engine is not there any more, or gives something else
    """
    name = name_of(path)
    if name == OWN:
        return sqlite3.connect(database, **options)
    try:
        connection: Any = _engine(name)(str(database), **options)
    except (sqlite3.Error, StartError):
        raise
    except Exception as error:
        raise StartError(f"the store {name!r} cannot open {path}: {type(error).__name__}: {error}") from error
    if not isinstance(connection, sqlite3.Connection):
        raise StartError(f"the store {name!r} gave {type(connection).__name__} for {path}; expected sqlite3.Connection")
    return connection


def name_of(path: Path) -> str:
    """The engine that has made the database in the file ``path``, by name.

    :raises StartError: where something else says so than the operator's own file
    """
    beside = _beside(path)
    if not beside.exists():
        return OWN
    said = private.read(beside, _MOST_BYTES)
    name = "" if said is None else said.decode("utf-8", "replace").strip()
    if not name:
        raise StartError(
            f"{beside} should name what opens the log, but cannot be read as your own; see who put it there"
        )
    return name


def settle(path: Path, wanted: str) -> None:
    """Before the database in the file ``path`` is opened to be written: say what will have made it, if it is to be made
    now; and see that what there is was made so.

    :raises StartError: where it was made by another, or ``wanted`` is not there
    """
    if not path.exists() or not path.stat().st_size:
        if wanted != OWN:
            _engine(wanted)
            private.write(_beside(path), wanted.encode())
            return
        try:
            with suppress(FileNotFoundError):
                _beside(path).unlink()
        except OSError as error:
            raise unwritable(path.parent, error) from None
    elif (made_by := name_of(path)) != wanted:
        raise StartError(
            f"the state of this workspace was made by the store {made_by!r}, and [state] store asks for {wanted!r}; "
            f"set it to {made_by!r}, or choose another folder with --state DIR"
        )


def _beside(path: Path) -> Path:
    return path.with_name("store")


@lru_cache(maxsize=16)
def _engine(name: str) -> Engine:
    points = {point.name: point for point in installed()}
    if name not in points:
        there = ", ".join((OWN, *sorted(points)))
        raise StartError(f"there is no store {name!r} ([state] store); there are: {there}")
    try:
        made: Any = points[name].load()
    except Exception as error:
        raise StartError(
            f"the store {name!r} from {points[name].value} cannot be used: {type(error).__name__}: {error}"
        ) from error
    if not callable(made):
        raise StartError(
            f"the store {name!r} from {points[name].value} is none: expected a function that is called as sqlite3.connect is"
        )
    return cast("Engine", made)
