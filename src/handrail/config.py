"""What an operator has configured: one TOML file, checked whole, with every fault at once.

The file is ``handrail.toml`` in the platform's configuration folder unless one is named; the tool folders lie
beside it. Nothing is ever read from a workspace.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from handrail.contract.errors import Fault, LoadError
from handrail.contract.names import nearest
from handrail.contract.requires import Requires

FILE_NAME = "handrail.toml"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LimitSettings(_Table):
    """``[limits]``: budgets of every call, in milliseconds."""

    lock_wait_ms: Annotated[int, Field(gt=0)] = 60_000
    grace_ms: Annotated[int, Field(gt=0)] = 5_000


class WatchdogSettings(_Table):
    """``[[watchdogs]]``: an external command that sees each call before it runs."""

    command: Annotated[tuple[str, ...], Field(min_length=1)]
    timeout_ms: Annotated[int, Field(gt=0)] = 5_000


class Settings(_Table):
    """The whole file."""

    rules: tuple[str, ...] = ()
    """Rules of the project scope, as ``ACTION PERMISSION [PATTERN]``."""
    ceiling: Requires | None = None
    """What no agent on this host may exceed; left out, the agent's own declarations are the bound."""
    limits: LimitSettings = LimitSettings()
    watchdogs: tuple[WatchdogSettings, ...] = ()


@dataclass(frozen=True, slots=True)
class Configuration:
    """Settings with the place they came from. ``folder`` holds ``tools/`` and ``agents/<name>/tools/``."""

    settings: Settings
    folder: Path
    file: Path | None

    def tool_folders(self, agent: str) -> tuple[tuple[str, Path], ...]:
        """``(name, folder)`` of the global and the agent's tool folder, in loading order."""
        return (("global", self.folder / "tools"), ("agent", self.folder / "agents" / agent / "tools"))


def default_folder() -> Path:
    """The platform's configuration folder."""
    import platformdirs

    return Path(platformdirs.user_config_dir("handrail", appauthor=False))


def load(file: str | Path | None) -> Configuration:
    """Read and check the configuration.

    :param file: the file to read, which must exist; None for the default one, which may be absent
    :raises LoadError: with every fault of the file
    """
    path = Path(file) if file is not None else default_folder() / FILE_NAME
    if file is None and not path.exists():
        return Configuration(Settings(), path.parent, None)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LoadError([Fault(str(path), "", f"cannot be read: {error.strerror or error}")]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise LoadError([Fault(str(path), "", f"is not TOML: {error}")]) from None
    try:
        settings = Settings.model_validate(table)
    except ValidationError as error:
        raise LoadError([_fault(str(path), dict(problem)) for problem in error.errors()]) from None
    return Configuration(settings, path.parent.absolute(), path)


def check_apart(settings: Configuration, workspace: Path) -> None:
    """The configuration decides what a model may do, so it lies where no call can write.

    :raises LoadError: when it is in the workspace, by its name or behind a link
    """
    if settings.file is None:
        return
    for place in (settings.file.absolute(), settings.file.resolve()):
        if place.is_relative_to(workspace):
            problem = f"lies in the workspace {workspace}, where a model can write; keep it in a folder apart from it"
            raise LoadError([Fault(str(settings.file), "", problem)])


def _fault(source: str, problem: dict[str, Any]) -> Fault:
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        model = _table_at(problem["loc"][:-1])
        near = nearest(str(problem["loc"][-1]), model.model_fields) if model else []
        known = (
            f"did you mean {near[0]!r}?"
            if near
            else f"there are {', '.join(sorted(model.model_fields) if model else [])}"
        )
        return Fault(source, place, f"unknown key; {known}")
    return Fault(source, place, str(problem["msg"]))


def _table_at(path: tuple[Any, ...]) -> type[BaseModel] | None:
    """The model behind a place in the file, to name the keys it has."""
    tables: dict[str, type[BaseModel]] = {"limits": LimitSettings, "watchdogs": WatchdogSettings, "ceiling": Requires}
    return Settings if not path else tables.get(str(path[0]))
