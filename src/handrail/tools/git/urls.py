"""Where a remote is: an address on the web, a path, or something that these tools do not reach."""

from __future__ import annotations

import re
from typing import Literal

from handrail.contract.errors import ToolError
from handrail.contract.text.hosts import WebAddress, read_url

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HELPER = re.compile(r"[A-Za-z0-9+-]+::")
_SSH = re.compile(r"[^/:]+:(?!//)")
_CREDENTIALS = re.compile(r"(://)[^/?#]*@")

NO_SSH = (
    "is reached over ssh, for which these tools have neither keys nor a way out of their sandbox. Use the repository's "
    "https address, or have a person do it"
)


def kind_of(url: str) -> Literal["web", "path", "ssh", "other"]:
    """What git would do to reach it."""
    if _HELPER.match(url):
        return "other"
    if (match := _SCHEME.match(url)) is not None:
        scheme = match[1].lower()
        if scheme in ("http", "https"):
            return "web"
        if scheme in ("ssh", "git+ssh", "ssh+git"):
            return "ssh"
        return "path" if scheme == "file" else "other"
    return "ssh" if _SSH.match(url) else "path"


def web(url: str) -> WebAddress:
    """An address on the web, as it is given to a tool: without a name or password in it.

    :raises ToolError: ``invalid_input`` or ``unavailable``, saying what would do
    """
    kind = kind_of(url)
    if kind == "ssh":
        raise ToolError(f"{without_credentials(url)} {NO_SSH}", kind="unavailable")
    if kind == "other":
        raise ToolError(
            f"{without_credentials(url)} names a transport that these tools do not use; give an https address",
            kind="unavailable",
        )
    try:
        return read_url(url)
    except ValueError as error:
        raise ToolError(str(error), kind="invalid_input") from None


def without_credentials(url: str) -> str:
    """An address for a result: what stands before its host may be a password."""
    shown = _CREDENTIALS.sub(r"\1", url)
    return shown.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def same(given: str, found: str) -> bool:
    """Whether two addresses on the web are one, whatever name and password stand in them."""
    try:
        return str(web(without_credentials(given))) == str(web(without_credentials(found)))
    except ToolError:
        return False
