"""Which of the kernel's own locale a program is given: a character set in which every reader finds the same backslashes.

In GBK, Big5 and Shift-JIS the second byte of a character may be that of a backslash. A shell in such a locale reads a
text otherwise than the parser that judged it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PLAIN = "C.UTF-8"
"""What stands in the place of any other."""
_KEPT = ("LANG", "LC_ALL", "LC_CTYPE")
NAMES = (*_KEPT, "TZ")
"""What :func:`passed_on` looks at."""
_READ_ALIKE = re.compile(r"C|POSIX|[A-Za-z0-9_]+\.UTF-?8(?:@[A-Za-z0-9_]+)?", re.IGNORECASE)


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the locale and the time zone, as far as they are set: UTF-8, ``C`` and ``POSIX`` as they are."""
    found = {
        name: value if _READ_ALIKE.fullmatch(value) else PLAIN for name in _KEPT if (value := environment.get(name))
    }
    return found | ({"TZ": environment["TZ"]} if "TZ" in environment else {})
