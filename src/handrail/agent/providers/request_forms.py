"""The forms of a request that some servers of an API demand, learned from their refusals."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from handrail.agent.model_protocol import BlockEvent, ContextOverflow, ProviderBusy, RequestRejected

PLAIN_SCHEMAS = "plain schemas"
REFUSED_SCHEMA = re.compile(
    r"(?i)(?:invalid|unsupported) (?:json )?schema|not a valid .{0,40}\bschema|schema (?:is )?(?:invalid|not (?:supported|valid|allowed))"
    r"|\$ref|\$defs|\b(?:any|one|all)Of\b|additional_?properties|parameters\b.{0,80}\bformat\b"
)
"""The words of a refusal of a tool's schema, after which :data:`PLAIN_SCHEMAS` is the form."""


class AcceptedForms:
    """The forms that one server demands of a request, beyond the usual one.

    :param patterns: by the name of a form, the words of a refusal that demands it
    """

    def __init__(self, patterns: Mapping[str, re.Pattern[str]]) -> None:
        self._patterns = patterns
        self.chosen: tuple[str, ...] = ()
        """The names of the demanded forms."""

    async def stream(self, send: Callable[[], AsyncGenerator[BlockEvent, None]]) -> AsyncGenerator[BlockEvent, None]:
        """Yield the reply to a request. If the server rejects its form, send it again in the demanded form.

        :param send: sends the request in the chosen forms
        """
        known = self.chosen
        while True:
            begun = False
            try:
                async with aclosing(send()) as events:
                    async for event in events:
                        begun = True
                        yield event
                return
            except (RequestRejected, ProviderBusy) as refused:
                form = None if isinstance(refused, ContextOverflow) else self._find_demanded_form(str(refused))
                if begun or form is None:
                    self.chosen = known  # a form that does not help is not kept
                    raise
                self.chosen = (*self.chosen, form)

    def _find_demanded_form(self, refusal: str) -> str | None:
        left = (name for name in self._patterns if name not in self.chosen)
        return next((name for name in left if self._patterns[name].search(refusal)), None)
