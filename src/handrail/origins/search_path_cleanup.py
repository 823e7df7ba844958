"""Removal of the current folder from the module search path, before a program of Handrail imports other modules.

It uses only modules that the interpreter has loaded already, since each further import would search that folder first.
"""

from __future__ import annotations

import os
import sys


def remove_untrusted_sys_path_entries() -> None:
    """Remove the current folder, and project folders in PYTHONPATH, from ``sys.path``.

    ``python -m`` adds the current folder. PYTHONPATH may name a folder of the project: one in or around the current folder or
    the workspace of the command line. The folders of Handrail's and Python's installation stay.
    """
    try:
        here = os.path.realpath(os.getcwd())  # noqa: PTH109
    except OSError:  # it was removed, so a relative path leads nowhere
        here = "/"
    beside = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    own = (beside, os.path.dirname(os.__file__), f"{sys.prefix}/lib")  # noqa: PTH120

    def make_canonical(path: str) -> str:
        return os.path.realpath(os.path.join(here, path))  # noqa: PTH118 - keeps an absolute path as it is

    broad = ("/", make_canonical(os.path.expanduser("~")))  # noqa: PTH111
    projects = [
        one
        for one in (here, *(make_canonical(word) for word in _find_workspace_arguments(sys.argv[1:])))
        if one not in broad
    ]
    named = {
        os.path.normpath(os.path.join(here, one))  # noqa: PTH118 - keeps an absolute path as it is
        for one in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    }

    def is_kept(entry: str) -> bool:
        if not entry.startswith("/"):
            return False
        if any(entry == folder or entry.startswith(f"{folder}/") for folder in own):
            return True
        real = os.path.realpath(entry)
        by_variable = os.path.abspath(entry) in named  # noqa: PTH100
        return real != here and not (by_variable and any(_do_folders_overlap(real, project) for project in projects))

    sys.path[:] = [entry for entry in sys.path if is_kept(entry)]


def _do_folders_overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _find_workspace_arguments(words: list[str]) -> list[str]:
    """Return every folder that a command line may name as the workspace."""
    found: list[str] = []
    for word, following in zip(words, (*words[1:], ""), strict=False):  # there may be no words
        if word.startswith("--workspace"):
            found.append(word.partition("=")[2] or following)
        elif word.startswith("-") and not word.startswith("--") and "C" in word:
            found.append(word.partition("C")[2] or following)
    return [one for one in found if one]
