"""A workspace database that an installed package opens."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tests.store.places import Place

from handrail import LoadError, StartError
from handrail.config import load_configuration
from handrail.record.log_reader import LogReader
from handrail.record.verification import verify_log
from handrail.store.database import journal, workspace_database
from handrail.store.database import sqlite_connection as engines
from handrail.store.database.sqlite_connection import compact, open_writer
from handrail.store.state_folders import locate_folders
from handrail.testing.scripted_kernel import temporary_kernel

PAGE = 16384
opened: list[str] = []


def large_pages(workspace_database: str, **options: Any) -> sqlite3.Connection:
    """An engine whose databases are recognisable by their larger pages."""
    opened.append(workspace_database)
    connection = sqlite3.connect(workspace_database, **options)
    if "mode=ro" not in workspace_database:
        connection.execute(f"PRAGMA page_size = {PAGE}")
    return connection


def something_else(workspace_database: str, **options: Any) -> object:
    return workspace_database, options


def failing(database: str, **options: Any) -> object:
    raise RuntimeError(f"no key for {database} and {len(options)} options")


@pytest.fixture(autouse=True)
def offers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Return the engines of packages by name."""
    offered = {"large": "large_pages"}
    opened.clear()
    engines._load_engine.cache_clear()  # pyright: ignore[reportPrivateUsage]

    def points() -> list[metadata.EntryPoint]:
        return [
            metadata.EntryPoint(name, f"{__name__}:{value}" if ":" not in value else value, engines.ENTRY_POINT_GROUP)
            for name, value in offered.items()
        ]

    monkeypatch.setattr(engines, "find_engine_entry_points", points)
    yield offered
    engines._load_engine.cache_clear()  # pyright: ignore[reportPrivateUsage]


def page_size(workspace_database: Path) -> int:
    return int.from_bytes(workspace_database.read_bytes()[16:18], "big")


async def carried_out(folder: Path, store: str | None = "large") -> Path:
    """One call on record; gives the database."""
    settings = "" if store is None else f'[state]\nstore = "{store}"\n'
    async with temporary_kernel(folder, settings=settings) as kernel:
        (Path(kernel.workdir) / "a.txt").write_text("there")
        result = await (await kernel.session()).call("read", {"path": "a.txt"})
        assert result.data["text"] == "there"
        return locate_folders(kernel.workdir, folder / "state").database_file


@pytest.mark.proves("R-09")
async def test_an_installed_package_opens_the_database_when_the_operator_selects_it(tmp_path: Path) -> None:
    workspace_database = await carried_out(tmp_path)
    assert page_size(workspace_database) == PAGE
    opened.clear()
    with LogReader.open_database(
        workspace_database
    ) as reader:  # whoever looks later is told nothing of the configuration
        assert verify_log(reader).ok
    assert len(opened) == 1 and "mode=ro" in opened[0]
    opened.clear()
    assert compact(workspace_database).problem is None
    assert opened == [str(workspace_database)]
    assert await carried_out(tmp_path) == workspace_database


@pytest.mark.proves("R-09")
async def test_state_is_opened_only_by_the_store_that_created_it(tmp_path: Path, offers: dict[str, str]) -> None:
    await carried_out(tmp_path)
    with pytest.raises(StartError, match=r"created by store `large`, but `\[state\] store` is `sqlite`"):
        await carried_out(tmp_path, None)
    offers.clear()
    engines._load_engine.cache_clear()  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(StartError, match=r"Store `large` .*Available: sqlite"):
        await carried_out(tmp_path)


async def test_state_of_the_default_store_does_not_change_to_another_store(tmp_path: Path) -> None:
    workspace_database = await carried_out(tmp_path, None)
    assert page_size(workspace_database) != PAGE and not opened and not workspace_database.with_name("store").exists()
    with pytest.raises(StartError, match="created by store `sqlite`"):
        await carried_out(tmp_path)
    workspace_database.rename(workspace_database.with_name("kept"))
    with pytest.raises(StartError, match=r"record 6 was written.*handrail log acknowledge"):
        await carried_out(tmp_path)
    (workspace_database.parents[2] / "heads" / workspace_database.parent.name).unlink()
    assert page_size(await carried_out(tmp_path)) == PAGE


@pytest.mark.parametrize(
    ("store", "value", "wanted"),
    [
        ("larg", "large_pages", r"Store `larg` .*Available: sqlite, large"),
        ("large", "handrail.no_such_module:connect", "cannot be loaded: ModuleNotFoundError"),
        ("large", "PAGE", "is invalid. Expected a function"),
        ("large", "something_else", "returned tuple for .*. Expected sqlite3.Connection"),
        ("large", "failing", "cannot open .*: RuntimeError: no key for"),
    ],
)
async def test_an_invalid_store_stops_the_start_with_a_clear_error(
    tmp_path: Path, offers: dict[str, str], store: str, value: str, wanted: str
) -> None:
    offers["large"] = value
    with pytest.raises(StartError, match=wanted):
        await carried_out(tmp_path, store)


def test_a_store_name_that_other_users_could_have_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("large")
    (tmp_path / "store").chmod(0o666)
    with pytest.raises(StartError, match="is not a readable file that you own"):
        engines.connect_engine(tmp_path / "handrail.db", tmp_path / "handrail.db")
    assert not (tmp_path / "handrail.db").exists()


def test_a_workspace_configuration_cannot_select_the_store(tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "handrail.toml").write_text('[state]\nstore = "large"\n')
    (tmp_path / "own.toml").write_text("")
    folders = locate_folders(workspace, tmp_path / "state")
    with pytest.raises(LoadError, match="cannot set up the state"):
        load_configuration(tmp_path / "own.toml", folders=folders, environment={})


@pytest.mark.usefixtures("offers")
def test_a_database_is_closed_when_its_opening_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place.beneath(tmp_path)
    made: list[sqlite3.Connection] = []

    def cannot_be_read(folder: Path) -> list[tuple[int, Path]]:
        raise OSError("a bad sector")

    def noticing(path: Path) -> sqlite3.Connection:
        made.append(open_writer(path))
        return made[-1]

    monkeypatch.setattr(workspace_database, "open_writer", noticing)
    monkeypatch.setattr(journal, "list_orphaned_journals", cannot_be_read)
    with pytest.raises(StartError, match="a bad sector"):
        place.open()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        made[0].execute("SELECT 1")
