"""Commands and addresses that look like carrying data out: files of secrets, the environment or encoded data on their way
into a program that talks to the network, data in host names and queries, and pushes to places that no remote names.

It knows shapes, not intentions, and a determined model finds others; what really keeps data in is the sandbox, which has
no network but the hosts that were granted. This asks before data goes to those.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from handrail.contract.text.excerpts import excerpt
from handrail.contract.text.patterns import any_path_source
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.rules.defaults import SECRET_LIKE
from handrail.policy.rules.rules import Action
from handrail.policy.watchdogs.commands import MADE, Part, parts, read
from handrail.policy.watchdogs.opinions import Opinion, WatchdogCall, allow

_WEB = frozenset({"curl", "wget", "http", "https", "xh", "aria2c", "lynx", "w3m"})
_RAW = frozenset({"nc", "ncat", "netcat", "socat", "telnet"})
_NAMES = frozenset({"dig", "nslookup", "host", "drill", "getent", "ping", "resolvectl"})
_COPY = frozenset(
    {"scp", "sftp", "rsync", "ftp", "tftp", "rclone", "s3cmd", "gsutil", "croc", "magic-wormhole", "wormhole"}
)
_OTHERS = frozenset({"ssh", "sendmail", "mail", "mutt", "msmtp"})
NETWORK = _WEB | _RAW | _NAMES | _COPY | _OTHERS
_ENCODERS = frozenset({"base64", "base32", "basenc", "xxd", "od", "hexdump", "uuencode", "gpg", "ascii85"})
_ARCHIVERS = frozenset({"tar", "zip", "gzip", "bzip2", "xz", "zstd", "7z", "cpio"})
_READERS = _ENCODERS | {
    "cat",
    "head",
    "tail",
    "strings",
    "sed",
    "awk",
    "grep",
    "rg",
    "env",
    "printenv",
    "tr",
    "jq",
    "find",
}
_INTERPRETERS = re.compile(r"(?:python|pypy)[\d.]*|node|nodejs|deno|bun|ruby|perl|php")
_OPENS_NETWORK = re.compile(
    r"urllib|requests\.|httpx|http\.client|aiohttp|socket|fetch\(|https?\.request|axios|Net::HTTP|LWP|open-uri|curl_|fsockopen"
)
_WHOLE_ENVIRONMENT = re.compile(
    r"os\.environ(?!\s*\[|\.get)|process\.env(?![\w.\[])|%ENV|\bENV\.to_h|getenv\(\)|/proc/\w+/environ"
)
_SECRET_FILES = re.compile(
    r"(?:^|/)(?:\.netrc|\.npmrc|\.pypirc|\.git-credentials|\.bash_history|\.zsh_history|\.pgpass|\.my\.cnf)$"
    r"|/?\.(?:ssh|gnupg|aws|kube|azure|config/gcloud|docker)(?:/|$)|^/etc/(?:shadow|sudoers)|^/proc/\w+/environ|\.tfstate"
)
_SECRET_NAMES = re.compile(
    any_path_source(f"**/{name}" for name in SECRET_LIKE) + r"\Z", re.DOTALL | re.IGNORECASE | re.ASCII
)
_HARMLESS = re.compile(r"\.(?:example|sample|template|dist|pub)$")
_SECRET_VARIABLE = re.compile(
    r"\$\{?[A-Za-z_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_?KEY|ACCESS_KEY|CREDENTIAL)[A-Za-z_]*",
    re.IGNORECASE,
)
_OF_THE_CONNECTION = frozenset(
    {
        *("-i", "-E", "-K", "--cacert", "--capath", "--cert", "--key", "--netrc-file", "--config", "-CAfile", "-cert"),
        *("-key", "-o", "--output", "-O", "--ca-certificate", "--certificate", "--private-key", "--known-hosts", "-H"),
        *("--header", "-u", "--user", "-A", "--user-agent", "-b", "--cookie", "-c", "--cookie-jar"),
    }
)
"""Options whose value is for the connection or is written to, not sent as the content."""
_DATA = re.compile(
    r"(?:-d|-F|-T|--data(?:-\w+)?|--form(?:-string)?|--json|--upload-file|--post-data|--post-file|--body-\w+)"
)
_DEVICE = re.compile(r"/dev/(?:tcp|udp)/([^/\s'\"]+)")
_REMOTE = re.compile(r"[a-z+]+://|[\w.-]+@[\w.-]+:|^/|^\.\.?/|^[A-Za-z]:\\")
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.\d+){3}|0\.0\.0\.0|\[?::1\]?)(?::\d+)?", re.IGNORECASE)
_ENCODED = re.compile(r"[A-Za-z0-9+/=_~-]+")
_QUICK = re.compile(
    r"curl|wget|https?\b|xh\b|aria2c|lynx|w3m|\bnc\b|ncat|netcat|socat|telnet|dig\b|nslookup|\bhost\b|drill|getent|ping|"
    r"resolvectl|scp|sftp|rsync|ftp|rclone|s3cmd|gsutil|croc|wormhole|ssh|mail|mutt|msmtp|/dev/(?:tc|ud)p|push|python|pypy|"
    r"node|deno|\bbun\b|ruby|perl|\bphp\b",
    re.IGNORECASE,
)

MOST_PARTS = 300
"""Commands of one text; among more of them nothing is looked for."""


class Exfiltration:
    """Implements :data:`~handrail.policy.watchdogs.watchdog.Watchdog`.

    :param action: what it answers to such a call
    """

    name = "exfiltration"

    def __init__(self, action: Action = "ask") -> None:
        self.action: Action = action

    def concerns(self, spec: ToolSpec) -> bool:
        """Whether calls of this tool can reach a program or the network."""
        return bool(spec.requires.shell or spec.requires.net.hosts or "net.fetch" in spec.effective_targets)

    async def __call__(self, call: WatchdogCall) -> Opinion:
        for capability, value in call.targets:
            if capability == "shell.run" and (reason := await read(of_command, value)) is not None:
                return Opinion(self.action, reason)
        for text in _texts(call.arguments):
            if "://" in text and len(text) < 20_000 and (reason := of_address(text.strip())) is not None:
                return Opinion(self.action, reason)
        return allow()


def of_command(text: str) -> str | None:
    """What about a shell text looks like carrying data out, in a sentence; None for nothing."""
    if not _QUICK.search(text):
        return None
    if (device := _DEVICE.search(text)) and not _LOOPBACK.fullmatch(device[1]):
        return f"the command opens a network connection through {device[0].rsplit('/', 1)[0]}"
    found = parts(text)
    if len(found) > MOST_PARTS:
        return f"the command is made of {len(found)} commands, which are too many to be looked through"
    for at, part in enumerate(found):
        if part.program in NETWORK and not _stays_here(part):
            together = [(n, other) for n, other in enumerate(found) if other.pipeline == part.pipeline and n != at]
            before = [
                other for n, other in together if other.depth > part.depth or (n < at and other.depth == part.depth)
            ]
            if (reason := _into_network(part, [other for _, other in together], before)) is not None:
                return reason
        elif part.program == "git":
            if (reason := _push(part, found)) is not None:
                return reason
        elif _INTERPRETERS.fullmatch(part.program) and (reason := _program_text(part)) is not None:
            return reason
    return None


def of_address(url: str) -> str | None:
    """What about an address looks like data; None for nothing."""
    try:
        found = urlsplit(url)
        host = found.hostname or ""
    except ValueError:
        return None
    if _LOOPBACK.fullmatch(host):
        return None
    if (reason := _of_host(host)) is not None:
        return reason
    values = [
        value for _, value in parse_qsl(f"{found.query}&{found.fragment}", keep_blank_values=True, max_num_fields=1000)
    ]
    for value in (*values, found.query, found.fragment):
        if len(value) >= 48 and _looks_encoded(value):
            return f"the query of the address ({len(value)} characters) looks like encoded data"
    for segment in found.path.split("/"):
        if len(segment) >= 120 and _looks_encoded(segment):
            return f"the path of the address ({len(segment)} characters) looks like encoded data"
    return None


def _into_network(part: Part, together: Sequence[Part], before: Sequence[Part]) -> str | None:
    program, argv = part.program, part.argv
    sent = list(_sent(argv))
    for other in before:
        if (secret := _secret_in(other.argv[1:])) is not None:
            return f"{secret} tends to hold secrets, and what is in it goes to {program}"
        if _prints_environment(other):
            return f"the environment goes to {program}"
        uploads = program in _WEB | _RAW or other.depth > part.depth
        if uploads and other.program in _ENCODERS and not {"-d", "-D", "--decode", "-r"} & set(other.argv):
            return f"encoded data goes from {other.program} to {program}"
        if uploads and other.program in _ARCHIVERS and other.depth == part.depth and program != "ssh":
            return f"packed files go from {other.program} to {program}"
        if program in _RAW and other.depth == part.depth and not {"-z", "-l"} & set(argv):
            return f"what {other.program or 'a command'} prints goes to a raw connection of {program}"
    if (secret := _secret_in(sent)) is not None:
        return f"{secret} tends to hold secrets, and {program} would send it"
    inner = [other.program for other in together if other.depth > part.depth]
    for word in _content(argv, program):
        if MADE in word and any(one in _READERS for one in inner):
            return f"what a file or the environment holds is put into an address or a body for {program}"
        if _SECRET_VARIABLE.search(word):
            return f"{_SECRET_VARIABLE.search(word)[0]} is put into an address or a body for {program}"  # type: ignore[index]
        if "://" in word and MADE not in word and (reason := of_address(word)) is not None:
            return reason
    if program in _NAMES:
        for word in argv[1:]:
            if not word.startswith(("-", "+", "@")) and (MADE in word or _SECRET_VARIABLE.search(word)) and "." in word:
                return f"a name that is put together is looked up with {program}"
            if (reason := _of_host(word)) is not None:
                return reason
    return None


def _sent(argv: Sequence[str]) -> Iterator[str]:
    """The words of a network program that name what it sends."""
    skip = False
    for word in argv[1:]:
        if skip:
            skip = False
        elif word in _OF_THE_CONNECTION:
            skip = True
        elif not word.startswith(("--cacert=", "--cert=", "--key=", "--output=", "--header=")):
            yield word


def _content(argv: Sequence[str], program: str) -> Iterator[str]:
    """Addresses and bodies among the words of a program that fetches."""
    data = False
    for word in _sent(argv):
        if data or "://" in word or (program in _RAW | _COPY):
            yield word
        elif word.startswith("-d") and len(word) > 2 and not word.startswith("--"):
            yield word[2:]
        elif word.startswith("--") and "=" in word and _DATA.fullmatch(word.partition("=")[0]):
            yield word.partition("=")[2]
        data = bool(_DATA.fullmatch(word))


def _secret_in(words: Sequence[str]) -> str | None:
    for word in words:
        for piece in (word, word.rpartition("@")[2], word.rpartition("=")[2].lstrip("@<")):
            path = piece.split(";")[0]
            if not path or "://" in path or path.startswith("-") or _HARMLESS.search(path):
                continue
            if _SECRET_FILES.search(path) or _SECRET_NAMES.match(path):
                return path if len(path) <= 100 else excerpt(path, 100)
    return None


def _prints_environment(part: Part) -> bool:
    argv = part.argv
    if part.program == "printenv" or (part.program in ("env", "set") and len(argv) == 1):
        return True
    return part.program in ("export", "declare", "typeset") and "-p" in argv[1:]


def _stays_here(part: Part) -> bool:
    """Whether all hosts that it names are this machine."""
    hosts = [m[1] for word in part.argv[1:] if (m := re.match(r"(?:[a-z+]+://)(?:[^/@]*@)?([^/?#]+)", word))]
    if not hosts and part.program in _RAW | _WEB | _NAMES:
        hosts = [word for word in part.argv[1:] if _LOOPBACK.fullmatch(word.partition("/")[0])]
    return bool(hosts) and all(_LOOPBACK.fullmatch(host) for host in hosts)


def _push(part: Part, found: Sequence[Part]) -> str | None:
    words = [word for word in part.argv[1:] if not word.startswith("-")]
    if words[:1] != ["push"]:
        return None
    if len(words) > 1 and _REMOTE.search(words[1]):
        return f"git would push to {excerpt(words[1], 100)}, which is no remote of this repository"
    for other in found:
        argv = other.argv
        if other.program == "git" and {"remote", "config"} & set(argv) and {"add", "set-url"} & set(argv):
            return "git would push to a remote that the same command sets"
    return None


def _program_text(part: Part) -> str | None:
    argv = part.argv
    for flag, text in pairwise(argv):
        if flag in ("-c", "-e", "-r", "-E", "--eval", "eval") and _OPENS_NETWORK.search(text):
            words = re.split(r"[\s'\"(),;=]+", text)
            if (secret := _secret_in(words)) is not None:
                return f"{secret} tends to hold secrets, and the text for {part.program} opens the network"
            if _WHOLE_ENVIRONMENT.search(text):
                return f"the text for {part.program} reads the environment and opens the network"
    return None


def _of_host(host: str) -> str | None:
    labels = host.rstrip(".").split(".")
    if len(labels) > 2:
        for label in (max(part.split("-"), key=len) for part in labels[:-2]):
            if len(label) > 50 or (len(label) >= 24 and _is_mixed(label) and _entropy(label) >= 3.4):
                return f"the host name has a part of {len(label)} characters that looks like encoded data"
        if len(labels) > 6 and sum(len(label) for label in labels[:-2]) > 100:
            return f"the host name has {len(labels)} parts, which looks like encoded data"
    return None


def _looks_encoded(text: str) -> bool:
    if not _ENCODED.fullmatch(text.replace("%3D", "=").replace("%2B", "+").replace("%2F", "/")):
        return False
    if re.fullmatch(r"[0-9a-fA-F-]+", text):
        return len(text) > 128  # digests, keys of caches and identifiers are shorter
    if re.fullmatch(r"[A-Z2-7=]+", text):
        return len(text) >= 56 and _entropy(text) >= 3.8
    mixed = bool(re.search("[a-z]", text) and re.search("[A-Z]", text) and re.search(r"\d", text))
    return mixed and _entropy(text) >= 4.2


def _is_mixed(text: str) -> bool:
    """Digits among letters, in more than one place."""
    return len(re.findall(r"[a-z]\d|\d[a-z]", text, re.IGNORECASE)) >= 4


def _entropy(text: str) -> float:
    """Bits for each character."""
    size = len(text)
    return -sum(count / size * math.log2(count / size) for count in Counter(text).values())


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif depth < 8 and isinstance(value, Mapping):
        for item in cast("Mapping[str, Any]", value).values():
            yield from _texts(item, depth + 1)
    elif depth < 8 and isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            yield from _texts(item, depth + 1)
