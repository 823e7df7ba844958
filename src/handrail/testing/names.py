"""A resolver that is told what names lead to, also to something else the second time.

::

    names = Names({"api.example.org": ["127.0.0.1"], "rebinds.example": [["198.51.100.7"], ["127.0.0.1"]]})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Names:
    """Implements :class:`handrail.sandbox.network.egress.Resolver` from a table.

    :param table: name to its addresses, or to a list of such answers: one for each question, the last for all further
    """

    def __init__(self, table: Mapping[str, Sequence[str] | Sequence[Sequence[str]]]) -> None:
        self._answers = {
            name: [list(answer) for answer in answers] if not _is_one(answers) else [[str(a) for a in answers]]
            for name, answers in table.items()
        }
        self.asked: list[str] = []
        """Every question, in order."""

    async def resolve(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        answers = self._answers.get(name)
        if answers is None:
            raise OSError(f"there is no name {name!r} in this table")
        return answers.pop(0) if len(answers) > 1 else answers[0]


def _is_one(answers: Sequence[str] | Sequence[Sequence[str]]) -> bool:
    return all(isinstance(answer, str) for answer in answers)
