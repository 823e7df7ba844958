"""What the programs that show the kernel at work have in common: their start and end, and a folder with a repository of their own."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from handrail import HandrailError, StartError
from handrail.sandbox import ProgramRefused, build_clean_path, find_program

OUTPUT, ERROR, CANNOT_START, INTERRUPTED = 0, 1, 5, 130
"""Exit codes, as the ``handrail`` program has them."""

IDENTITY = {
    "GIT_AUTHOR_NAME": "Handrail tour",
    "GIT_AUTHOR_EMAIL": "tour@handrail.invalid",
    "GIT_COMMITTER_NAME": "Handrail tour",
    "GIT_COMMITTER_EMAIL": "tour@handrail.invalid",
}
"""Who commits in the repositories of a demonstration: nobody that this machine knows."""


class Interruption:
    """The effect of a signal: the first one stops the calls that run, and the second ends the program."""

    def __init__(self) -> None:
        self.happened = False
        self.stop: Callable[[Literal["user", "shutdown"]], object] | None = None
        """Set while there is something to stop; without it the first signal ends the program."""

    def watch(self, task: asyncio.Task[int]) -> None:
        """Listen to the signals on the running loop, for ``task``."""

        def came(number: int) -> None:
            first, self.happened = not self.happened, True
            if first and self.stop is not None:
                self.stop("user" if number == signal.SIGINT else "shutdown")
            else:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, came, number)


def drive(main: Callable[[Interruption], Awaitable[int]]) -> int:
    """Run ``main`` to its exit code, which becomes 130 when a signal came."""
    interruption = Interruption()

    async def watched() -> int:
        task = asyncio.current_task()
        assert task is not None
        interruption.watch(task)
        return await main(interruption)

    try:
        code = asyncio.run(watched())
    except (asyncio.CancelledError, KeyboardInterrupt):
        code = INTERRUPTED
    return INTERRUPTED if interruption.happened else code


def visible(text: str) -> str:
    """``text`` with what a terminal would act on, or not show, spelled out."""
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\u{{{ord(c):x}}}" for c in text)


class Stuck(HandrailError):
    """A demonstration does not go on; the text says what it waited for."""


def parser(name: str, description: str, *, exit_codes: str) -> argparse.ArgumentParser:
    """The arguments of ``python -m demos.NAME``, with the one that all of them take.

    :param exit_codes: what each of them means, for the end of ``--help``
    """
    made = argparse.ArgumentParser(
        prog=f"python -m demos.{name}", description=description, epilog=f"Exit codes: {exit_codes}."
    )
    made.add_argument("--keep", action="store_true", help="keep the repository, its state and its log afterwards")
    return made


def show(name: str, main: Callable[[Interruption], Awaitable[int]]) -> int:
    """Run a demonstration to its exit code. What keeps it from beginning or from going on is told on stderr.

    :param name: what such a line begins with
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    os.environ.update(IDENTITY)  # for the commits that are made in the sandbox
    try:
        return drive(main)
    except HandrailError as error:
        sys.stderr.write(visible(f"{name}: {error}") + "\n")
        return ERROR if isinstance(error, Stuck) else CANNOT_START
    except BrokenPipeError:  # whoever watched has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR


@contextmanager
def own_folder(prefix: str, *, keep: bool) -> Generator[Path]:
    """A temporary folder, removed with all that is in it unless it is to be kept.

    :raises StartError: where none can be made
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
    except OSError as error:
        raise StartError(f"there is no temporary folder: {error}; name one with TMPDIR") from None
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder)


def put(path: Path, text: str) -> None:
    """Write a file, and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def git(workspace: Path, *arguments: str) -> str:
    """git as it is on a machine where nobody has configured it.

    :raises StartError: where there is none, or it fails
    """
    try:
        git = find_program("git")
    except ProgramRefused as error:
        raise StartError(f"this works on a git repository: {error} (install git)") from None
    nothing = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "HOME": str(workspace.parent)}
    fixed = ("-c", f"core.hooksPath={os.devnull}", "-c", "core.fsmonitor=false", "-c", "init.defaultBranch=main")
    done = subprocess.run(
        [git, *fixed, *arguments],
        cwd=workspace,
        env={"PATH": build_clean_path(), "LC_ALL": "C", **nothing, **IDENTITY},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()
        raise StartError(f"the repository cannot be made: git {arguments[0]}: {said or done.returncode}")
    return done.stdout.decode("utf-8", "replace")
