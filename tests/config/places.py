"""A workspace, configuration and state of one test, and functions that load them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from handrail.config import MergedConfiguration, load_configuration
from handrail.contract.errors import LoadError
from handrail.store import operator_decisions
from handrail.store.state_folders import StateFolders, prepare_folders


@dataclass(frozen=True)
class Layers:
    """``config`` is the operator's file, ``own`` the workspace's."""

    folder: Path

    @property
    def workspace(self) -> Path:
        return self.folder / "ws"

    @property
    def config(self) -> Path:
        return self.folder / "config" / "handrail.toml"

    @property
    def own(self) -> Path:
        return self.workspace / "handrail.toml"

    @property
    def folders(self) -> StateFolders:
        return prepare_folders(self.workspace, self.folder / "state")

    @staticmethod
    def beneath(folder: Path) -> Layers:
        made = Layers(folder.resolve())
        made.workspace.mkdir(parents=True)
        made.config.parent.mkdir()
        made.config.write_text("")
        return made

    def load(self, environment: Mapping[str, str] | None = None, flags: Iterable[str] = ()) -> MergedConfiguration:
        return load_configuration(self.config, folders=self.folders, environment=environment or {}, flags=flags)

    def trust(self) -> None:
        """Trust the current content of the workspace's file, as a user does."""
        found = self.load().workspace
        assert found is not None
        operator_decisions.trust_workspace_content(self.folders, found.sha256, clock=lambda: 1)

    def faults(self, environment: Mapping[str, str] | None = None, flags: Iterable[str] = ()) -> list[str]:
        """Return the faults that prevent a start, by line."""
        try:
            self.load(environment, flags)
        except LoadError as error:
            return [str(fault) for fault in error.diagnostics]
        return []
