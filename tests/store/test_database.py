"""The database: versioned, refused if damaged, foreign or newer, and readable by others."""

from __future__ import annotations

import resource
import shutil
import sqlite3
import stat
from pathlib import Path

import pytest
from tests.store.places import Place

from handrail.contract.errors import StartError
from handrail.store.database import sqlite_connection as store_connection
from handrail.store.database.schema_migrations import VERSION
from handrail.store.database.sqlite_connection import open_reader
from handrail.store.tables.session_tables import SessionRow


async def create_database(place: Place) -> Path:
    await place.open().aclose()
    return place.folders.database_file


@pytest.mark.proves("G-09a")
async def test_a_new_database_has_the_newest_schema_and_private_permissions(place: Place) -> None:
    path = await create_database(place)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


@pytest.mark.proves("G-09a")
async def test_a_database_of_a_newer_version_is_refused_with_the_required_version(place: Place) -> None:
    path = await create_database(place)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {VERSION + 6}")
    connection.execute("UPDATE meta SET value = '9.8.7' WHERE key = 'written_by'")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StartError, match=rf"schema {VERSION + 6}.*supports up to {VERSION}.*handrail 9\.8\.7 or later"):
        place.open()
    with pytest.raises(StartError, match=r"handrail 9\.8\.7"):
        open_reader(path)
    assert path.read_bytes() == before


async def test_a_full_disk_is_not_reported_as_a_damaged_database(place: Place, tmp_path: Path) -> None:
    connection = store_connection.open_writer(await create_database(place))
    connection.execute("UPDATE meta SET value = value")
    left = [
        tmp_path / "copy.db",
        tmp_path / "copy.db-wal",
    ]  # as a killed process leaves them, without its shared memory
    for copy, suffix in zip(left, ("", "-wal"), strict=True):
        shutil.copy(f"{place.folders.database_file}{suffix}", copy)
    connection.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, hard))
    try:
        with pytest.raises(sqlite3.OperationalError) as failed:
            store_connection.open_writer(left[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be written" in store_connection.explain_database_error(left[0], failed.value)


@pytest.mark.parametrize("content", [b"not a database " * 100, b"SQLite format 3\0" + b"\xff" * 5000])
async def test_a_damaged_database_is_reported_with_the_remedy_and_left_unchanged(place: Place, content: bytes) -> None:
    path = await create_database(place)
    path.write_bytes(content)
    for opening in (place.open, lambda: open_reader(path)):
        with pytest.raises(StartError, match=rf"{path} is damaged: .*mv '{path}'"):
            opening()
    assert path.read_bytes() == content


async def test_a_database_of_another_program_is_refused_and_left_unchanged(place: Place) -> None:
    path = await create_database(place)
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks (url)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StartError, match="another program"):
        place.open()
    assert path.read_bytes() == before


async def test_a_reader_sees_what_the_owner_has_written_and_cannot_write(place: Place) -> None:
    store = place.open()
    await store.sessions.record_opened(SessionRow("ses_1", 5))
    read = place.finished(
        "import sys, sqlite3\n"
        "from handrail.store.state_folders import locate_folders\n"
        "from handrail.store.database.sqlite_connection import open_reader\n"
        "reader = open_reader(locate_folders(sys.argv[1], sys.argv[2]).database_file)\n"
        "print(reader.execute('SELECT id FROM session').fetchall())\n"
        "try:\n    reader.execute('DELETE FROM session')\n"
        "except sqlite3.OperationalError as error:\n    print('refused', error)\n"
    )
    assert "('ses_1',)" in read and "refused" in read
    await store.aclose()


async def test_a_reader_reports_that_an_unused_workspace_has_no_database(place: Place) -> None:
    with pytest.raises(StartError, match="does not exist yet"):
        open_reader(place.folders.database_file)
    assert not place.state.exists()


async def test_a_reader_opens_a_database_after_its_owner_has_closed(place: Place) -> None:
    reader = open_reader(await create_database(place))
    assert reader.execute("SELECT count(*) FROM record").fetchone() == (0,)
    reader.close()


def test_a_full_disk_stops_the_start_with_the_next_step(place: Place) -> None:
    said = place.finished(
        "import sys, resource\n"
        "from handrail.contract.errors import StartError\n"
        "from handrail.store.workspace_store import WorkspaceStore\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))\n"
        "try:\n    WorkspaceStore.open(sys.argv[1], sys.argv[2])\n"
        "except StartError as error:\n    print(error)\n",
        "8192",
    )
    assert str(place.state) in said and "cannot be written" in said and "--state DIR" in said, said


def test_a_database_created_during_its_check_is_not_mistaken_for_another_program(tmp_path: Path) -> None:
    path = tmp_path / "handrail.db"
    maker = store_connection.open_writer(path)  # it is a database already, without any table
    looking = sqlite3.connect(path, isolation_level=None)
    seen: list[str] = []

    def meanwhile(sql: str) -> None:
        if "sqlite_master" in sql and not seen:  # the last thing that is looked at
            seen.append(sql)
            maker.execute("BEGIN IMMEDIATE")
            store_connection.migrate(path, maker)
            maker.execute("COMMIT")

    looking.set_trace_callback(meanwhile)
    for _ in range(2):
        store_connection._check_version(path, looking)  # pyright: ignore[reportPrivateUsage]
    assert seen and not looking.in_transaction
    looking.close()
    maker.close()


def test_a_full_disk_is_named_also_under_a_limit_of_file_sizes(place: Place) -> None:
    told = place.finished(
        "import resource, sqlite3\n"
        "from pathlib import Path\n"
        "from handrail.store.database.sqlite_connection import explain_database_error\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "connection = sqlite3.connect(':memory:')\n"
        "connection.execute('PRAGMA max_page_count = 2')\n"
        "try:\n"
        "    connection.execute('CREATE TABLE large AS SELECT randomblob(100000)')\n"
        "except sqlite3.Error as error:\n"
        "    print(explain_database_error(Path('handrail.db'), error))\n"
    )
    assert "Free some disk space there" in told and f"ulimit -f: {1 << 40:,} bytes" in told
