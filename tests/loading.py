"""Faster loading of seven thousand tests: shared by the pytest-xdist processes, without garbage collection.

pytest rewrites each file's assertions, which takes longer than all its imports, and keeps the outcome beside the file.
Every process needs all files. Where each began with the first, each would rewrite all of them at the same moment; so
every second process begins at the end, and from the middle on finds what the other has kept.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

gc.disable()  # what is loaded stays; while tests run there is garbage again


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Before a second process collects the whole suite. pytest reports a file that cannot be loaded."""
    number = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    whole = session.config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if sys.dont_write_bytecode or not whole or int(number) % 2 == 0:
        return
    for file in sorted(TESTS.rglob("test_*.py"), reverse=True):
        try:
            import_module(".".join(file.relative_to(TESTS.parent).with_suffix("").parts))
        except (Exception, pytest.skip.Exception):
            continue


def pytest_collection_finish() -> None:
    """Exempt loaded objects from every later garbage collection."""
    gc.freeze()
    gc.enable()
