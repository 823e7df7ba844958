"""Regular expressions that are compiled when they are first used, for modules that most processes only load."""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast


class _UncompiledPattern:
    """A regular expression before its first use. Afterwards it has the methods of the compiled one."""

    def __init__(self, source: str | bytes, flags: int) -> None:
        self._source = source
        self._flags = flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = re.compile(self._source, self._flags)
        self.__dict__.update({one: getattr(found, one) for one in dir(found) if not one.startswith("__")})
        return getattr(found, name)


def compile_regex_lazily(source: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """Return a regular expression that is compiled when it is first used."""
    return cast("re.Pattern[AnyStr]", _UncompiledPattern(source, flags))
