"""What serves git's clones and pushes at the other end, where it is git's own and runs nothing that the repository there names."""

from __future__ import annotations

from itertools import product
from typing import Literal

_SERVES = (
    "git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.alternateRefsCommand=: -c gc.auto=0 "
    "-c maintenance.auto=false -c receive.autogc=false -c receive.denyCurrentBranch=refuse -c 'safe.directory=*' "
)
"""git at the other end of a path. It is started without the environment of this end, so it is told on its own command line."""

Service = Literal["upload-pack", "receive-pack"]


def serving(service: Service, *, by_path: bool) -> str:
    """The option that says what serves a clone (``upload-pack``) or a push (``receive-pack``).

    Of a remote's ``uploadpack`` and ``receivepack`` git takes the first that it reads, which is the repository's own and
    not one that is set over it. An option outranks both.

    :param by_path: whether git starts it, on this machine; a server on the web is asked by its name
    """
    return f"--{service}={_SERVES}{service}" if by_path else f"--{service}=git-{service}"


_SERVICES: tuple[Service, ...] = ("upload-pack", "receive-pack")
SERVING = frozenset(serving(service, by_path=by_path) for service, by_path in product(_SERVICES, (True, False)))
"""All of these options: whoever gives one has git run no more than without it."""
