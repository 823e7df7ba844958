"""Tools that the model's provider carries out itself, within one run: which are offered, and what is kept of their use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from handrail.agent.events import NativeUsed, NativeWithheld
from handrail.agent.model import BlockEvent, Kept, Model, NativeGiven
from handrail.catalog.forms.native import in_own_form, name_in_reply
from handrail.contract.doors.history import History
from handrail.contract.errors import HandrailError
from handrail.contract.tool.native import NativeOffer
from handrail.contract.tool.spec import ToolSpec


class Natives:
    """For one agent: what of its manifest's tools a model gets.

    :param model: whose provider carries them out
    :param history: where what they give is kept; None keeps nothing
    """

    def __init__(self, model: Model, history: History | None) -> None:
        self._model = model
        self._history = history
        self._ids: dict[str, str] = {}
        """By the name in a reply."""
        self._told: dict[str, str] = {}
        self.forms: tuple[Mapping[str, Any], ...] = ()
        """As the provider takes them, in the next request."""
        self.offered: tuple[ToolSpec, ...] = ()

    def choose(self, offers: Iterable[NativeOffer], taken: Iterable[str]) -> list[NativeWithheld]:
        """Settle what the next request offers. Gives what it does not, where that was not said yet.

        :param taken: wire names of the tools in view, which no other may have
        """
        forms: list[Mapping[str, Any]] = []
        offered: list[ToolSpec] = []
        withheld: list[NativeWithheld] = []
        names, dialect = set(taken), self._model.dialect
        for spec, refused in offers:
            form = refused or in_own_form(spec, dialect, self._model.name.partition(":")[2])
            if not isinstance(form, str) and (name := form.get("name")) in names:
                form = f"the provider calls it {name!r}, which is the name of another tool in view"
            if isinstance(form, str):
                if self._told.get(spec.id) != form:
                    self._told[spec.id] = form
                    withheld.append(NativeWithheld(spec.id, form))
                continue
            self._told.pop(spec.id, None)
            forms.append(form)
            offered.append(spec)
            self._ids[name_in_reply(spec, dialect)] = spec.id
        self.forms, self.offered = tuple(forms), tuple(offered)
        return withheld

    async def take(self, given: NativeGiven) -> tuple[NativeUsed, BlockEvent]:
        """Keep what came of a use. Gives what is told of it, and what the reply has of it."""
        tool_id = self._ids.get(given.name, "")
        artifacts: tuple[str, ...] = ()
        problem = ""
        if self._history is not None:
            about = {
                "provider": self._model.name,
                "name": given.name,
                "tool": tool_id,
                "arguments": dict(given.arguments),
                "failed": given.failed,
            }
            try:
                artifacts = tuple(await self._history.provided(about, given.content))
            except HandrailError as error:
                problem = str(error)
        used = NativeUsed(given.name, tool_id, given.arguments, artifacts, given.failed, problem)
        if isinstance(given.kept, Kept):
            given = replace(given, kept=replace(given.kept, artifacts=artifacts))
        return used, given
