"""The shipped watchdogs: exfiltration by commands and addresses, secrets in arguments, and calls that always fail.

The check for exfiltration finds secret files, the environment or encoded data on their way into a network program. It also
finds data in host names and queries, and pushes to places that no remote names. It knows shapes, not intentions, and a
determined model finds others. The sandbox is the real barrier: it has no network except the granted hosts. This check asks
before data goes to those hosts.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar, cast
from urllib.parse import parse_qsl, urlsplit

from handrail.contract.errors import quote_text_or_length
from handrail.contract.struct import Struct, field
from handrail.contract.text.glob_patterns import build_any_path_glob_expression
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.spec import ToolSpec
from handrail.policy.rules.rules_and_modes import SECRET_FILE_NAMES, Action
from handrail.policy.watchdogs.api import WatchdogCall, WatchdogDecision, allow

# A rough decomposition of a shell text: its programs, the data flow between them, and the values that it builds.
#
# It is not a parser and allows nothing. It looks for shapes even in text that no parser accepts, and never raises.

MAX_CHARACTERS = 100_000
_T = TypeVar("_T")
_SHORT = 4_000
"""The number of characters that are read within 10 ms."""
SUBSTITUTED = "\0"
"""The placeholder in a word for the output of a substitution."""
_WRAPPERS = {
    **dict.fromkeys(("sudo", "doas", "nohup", "time", "exec", "command", "builtin", "nice", "stdbuf", "setsid"), 0),
    **dict.fromkeys(("then", "do", "else", "if", "while", "until", "!", "{", "xargs", "ionice", "unbuffer"), 0),
    "timeout": 1,
}
"""Words before a program, and how many of their own arguments follow."""
_ASSIGNMENT = compile_regex_lazily(r"[A-Za-z_]\w*\+?=")
_PLAIN = compile_regex_lazily(r"(?:[^\\'\"`$|;&\n() \t#<>]|\$(?!\())+")
_PLAIN_QUOTED = compile_regex_lazily(r'(?:[^"\\`$]|\$(?!\())+')


class ApproximateShellCommand(Struct):
    """One command of a shell text.

    :param words: without quotes, and without the files of redirections
    :param depth: the number of substitutions around it; with more than 0, its output becomes a part of the outer command
    """

    pipeline: int
    depth: int
    words: list[str] = field(default_factory=list[str])

    @property
    def unwrapped_argv(self) -> list[str]:
        """The words from the program on, without assignments and wrappers."""
        words = self.words
        at = 0
        while at < len(words):
            word = words[at]
            name = word.rsplit("/", 1)[-1]
            if _ASSIGNMENT.match(word):
                at += 1
            elif name in _WRAPPERS or (name == "env" and at + 1 < len(words)):
                at += 1 + _WRAPPERS.get(name, 0)
                while at < len(words) and words[at].startswith("-"):
                    at += 1
            else:
                break
        return words[at:]

    @property
    def program(self) -> str:
        argv = self.unwrapped_argv
        return argv[0].rsplit("/", 1)[-1].lower() if argv else ""


async def apply_reader_to_shell_text(reader: Callable[[str], _T], text: str) -> _T:
    """Return the result of ``reader`` for a shell text.

    A long text is read in a thread, so that the event loop continues.
    """
    return reader(text) if len(text) <= _SHORT else await asyncio.to_thread(reader, text)


def split_commands(text: str) -> list[ApproximateShellCommand]:
    """Return the commands of ``text``, those in substitutions included."""
    # Cut, because the watchdog runs before each call and must not delay it.
    reader = _RoughParser(text[:MAX_CHARACTERS])
    reader.read()
    return [part for part in reader.found if part.words]


class _RoughParser:
    """A rough reader of shell text, which never fails."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[ApproximateShellCommand] = []
        self._at: int = 0
        self._pipelines = 0

    def read(self) -> None:
        while self._at < len(self.text):
            self._commands("", 0, self._next_pipeline())
            self._at += 1  # an extra closing bracket

    def _next_pipeline(self) -> int:
        self._pipelines += 1
        return self._pipelines

    def _commands(self, until: str, depth: int, pipeline: int) -> None:
        """Read up to the closing character, and leave that character unread."""
        line = _CommandInProgress(self._begin(pipeline, depth))
        text, size = self.text, len(self.text)
        while self._at < size:
            character = text[self._at]
            if character == until and until:
                break
            if character in " \t":
                line.end_word()
            elif character in "|;&\n()":
                line.end_word()
                self._separate(line)
            elif character in "<>" and not text.startswith("<(", self._at):
                line.begin_redirection(outward=character == ">")
                while self._at + 1 < size and text[self._at + 1] in "<>&":
                    self._at += 1
            elif character == "#" and line.word is None:
                end = text.find("\n", self._at)
                self._at = (size if end < 0 else end) - 1
            elif (piece := self._piece(line.part)) is not None:
                line.extend_word(piece)
            self._at += 1
        line.end_word()

    def _separate(self, line: _CommandInProgress) -> None:
        """Read a sign between two commands, and begin the next command."""
        character, sign = self.text[self._at], self.text[self._at : self._at + 2]
        part = line.part
        pipeline, depth = part.pipeline, part.depth
        if sign in ("||", "&&", "|&", ";;"):
            self._at += 1
        piped = character == "|" and sign != "||"
        if not piped and character not in "()" and depth == 0:
            pipeline = self._next_pipeline()
        if part.words or self.found[-1] is not part:
            line.part = self._begin(pipeline, depth)
        else:
            part.pipeline = pipeline

    def _piece(self, part: ApproximateShellCommand) -> str | None:
        """Read a piece of a word, up to its last character. Return None for a line continuation."""
        text, size = self.text, len(self.text)
        character = text[self._at]
        if character == "\\" and self._at + 1 < size:
            self._at += 1
            return None if text[self._at] == "\n" else text[self._at]
        if character == "'":
            start, end = self._at + 1, text.find("'", self._at + 1)
            self._at = size if end < 0 else end
            return text[start : self._at]
        if character == '"':
            return "".join(self._read_quoted_text(part.depth, part.pipeline))
        if character == "`" or text.startswith(("$(", "<("), self._at):
            return self._substitution(part.depth, part.pipeline)
        if run := _PLAIN.match(text, self._at):
            self._at = run.end() - 1
            return run.group()
        return character

    def _begin(self, pipeline: int, depth: int) -> ApproximateShellCommand:
        part = ApproximateShellCommand(pipeline, depth)
        self.found.append(part)
        return part

    def _read_quoted_text(self, depth: int, pipeline: int) -> Iterator[str]:
        self._at += 1
        while self._at < len(self.text) and self.text[self._at] != '"':
            character = self.text[self._at]
            if character == "\\" and self._at + 1 < len(self.text):
                self._at += 1
                yield self.text[self._at]
            elif character == "`" or self.text.startswith("$(", self._at):
                yield self._substitution(depth, pipeline)
            elif run := _PLAIN_QUOTED.match(self.text, self._at):
                yield run.group()
                self._at = run.end()
                continue
            else:
                yield character
            self._at += 1

    def _substitution(self, depth: int, pipeline: int) -> str:
        # The methods recurse for each substitution, and a hostile text could nest thousands of them.
        if depth > 20:
            self._at = len(self.text)
            return SUBSTITUTED
        backtick = self.text[self._at] == "`"
        self._at += 1 if backtick else 2
        self._commands("`" if backtick else ")", depth + 1, pipeline)
        return SUBSTITUTED


class _CommandInProgress:
    """The command that is being read, and its last word so far."""

    __slots__ = ("_redirected", "part", "word")

    def __init__(self, part: ApproximateShellCommand) -> None:
        self.part = part
        self.word: list[str] | None = None
        self._redirected = False

    def extend_word(self, piece: str) -> None:
        if self.word is None:
            self.word = [piece]
        else:
            self.word.append(piece)

    def end_word(self) -> None:
        if self.word is not None:
            if not self._redirected:
                self.part.words.append("".join(self.word))
            self._redirected = False
        self.word = None

    def begin_redirection(self, *, outward: bool) -> None:
        """End the word, without the number of a descriptor. The next word names the file."""
        if self.word is not None and "".join(self.word).isdigit():
            self.word = None
        self.end_word()
        self._redirected = outward


_WEB_CLIENTS = frozenset({"curl", "wget", "http", "https", "xh", "aria2c", "lynx", "w3m"})
_RAW_CLIENTS = frozenset({"nc", "ncat", "netcat", "socat", "telnet"})
_NAME_LOOKUPS = frozenset({"dig", "nslookup", "host", "drill", "getent", "ping", "resolvectl"})
_COPY_PROGRAMS = frozenset(
    {"scp", "sftp", "rsync", "ftp", "tftp", "rclone", "s3cmd", "gsutil", "croc", "magic-wormhole", "wormhole"}
)
_OTHER_CLIENTS = frozenset({"ssh", "sendmail", "mail", "mutt", "msmtp"})
NETWORK_PROGRAMS = _WEB_CLIENTS | _RAW_CLIENTS | _NAME_LOOKUPS | _COPY_PROGRAMS | _OTHER_CLIENTS
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
_INTERPRETERS = compile_regex_lazily(r"(?:python|pypy)[\d.]*|node|nodejs|deno|bun|ruby|perl|php")
_OPENS_NETWORK = compile_regex_lazily(
    r"urllib|requests\.|httpx|http\.client|aiohttp|socket|fetch\(|https?\.request|axios|Net::HTTP|LWP|open-uri|curl_|fsockopen"
)
_WHOLE_ENVIRONMENT = compile_regex_lazily(
    r"os\.environ(?!\s*\[|\.get)|process\.env(?![\w.\[])|%ENV|\bENV\.to_h|getenv\(\)|/proc/\w+/environ"
)
_SECRET_FILES = compile_regex_lazily(
    r"(?:^|/)(?:\.netrc|\.npmrc|\.pypirc|\.git-credentials|\.bash_history|\.zsh_history|\.pgpass|\.my\.cnf)$"
    r"|/?\.(?:ssh|gnupg|aws|kube|azure|config/gcloud|docker)(?:/|$)|^/etc/(?:shadow|sudoers)|^/proc/\w+/environ|\.tfstate"
)
_SECRET_NAMES = compile_regex_lazily(
    build_any_path_glob_expression(f"**/{name}" for name in SECRET_FILE_NAMES) + r"\Z",
    re.DOTALL | re.IGNORECASE | re.ASCII,
)
_HARMLESS = compile_regex_lazily(r"\.(?:example|sample|template|dist|pub)$")
_SECRET_VARIABLE = compile_regex_lazily(
    r"\$\{?[A-Za-z_]*(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|PRIVATE_?KEY|ACCESS_KEY|CREDENTIAL)[A-Za-z_]*",
    re.IGNORECASE,
)
_CONNECTION_OPTIONS = frozenset(
    {
        *("-i", "-E", "-K", "--cacert", "--capath", "--cert", "--key", "--netrc-file", "--config", "-CAfile", "-cert"),
        *("-key", "-o", "--output", "-O", "--ca-certificate", "--certificate", "--private-key", "--known-hosts", "-H"),
        *("--header", "-u", "--user", "-A", "--user-agent", "-b", "--cookie", "-c", "--cookie-jar"),
    }
)
"""Options whose value is for the connection, or names an output file, so that it is not sent as content."""
_DATA_OPTIONS = compile_regex_lazily(
    r"(?:-d|-F|-T|--data(?:-\w+)?|--form(?:-string)?|--json|--upload-file|--post-data|--post-file|--body-\w+)"
)
_DEVICE = compile_regex_lazily(r"/dev/(?:tcp|udp)/([^/\s'\"]+)")
_REMOTE = compile_regex_lazily(r"[a-z+]+://|[\w.-]+@[\w.-]+:|^/|^\.\.?/|^[A-Za-z]:\\")
_LOOPBACK = compile_regex_lazily(r"(?:localhost|127(?:\.\d+){3}|0\.0\.0\.0|\[?::1\]?)(?::\d+)?", re.IGNORECASE)
_ENCODED = compile_regex_lazily(r"[A-Za-z0-9+/=_~-]+")
_PRECHECK = compile_regex_lazily(
    r"curl|wget|https?\b|xh\b|aria2c|lynx|w3m|\bnc\b|ncat|netcat|socat|telnet|dig\b|nslookup|\bhost\b|drill|getent|ping|"
    r"resolvectl|scp|sftp|rsync|ftp|rclone|s3cmd|gsutil|croc|wormhole|ssh|mail|mutt|msmtp|/dev/(?:tc|ud)p|push|python|pypy|"
    r"node|deno|\bbun\b|ruby|perl|\bphp\b",
    re.IGNORECASE,
)

MAX_PARTS = 300
"""The maximum number of commands in a text that is checked."""


class ExfiltrationWatchdog:
    """A watchdog for commands and addresses that look like they carry data out.

    :param action: the decision about such a call
    """

    name = "exfiltration"

    def __init__(self, action: Action = "ask") -> None:
        self.action: Action = action

    def concerns(self, spec: ToolSpec) -> bool:
        """Return whether calls of this tool can reach a program or the network."""
        return bool(spec.requires.shell or spec.requires.net.hosts or "net.fetch" in spec.effective_targets)

    async def __call__(self, call: WatchdogCall) -> WatchdogDecision:
        for capability, value in call.targets:
            if (
                capability == "shell.run"
                and (reason := await apply_reader_to_shell_text(explain_command_exfiltration, value)) is not None
            ):
                return WatchdogDecision(self.action, reason)
        for text in _texts(call.arguments):
            if (
                "://" in text
                # A longer text is a document that mentions addresses, not an address.
                and len(text) < 20_000
                and (reason := explain_address_exfiltration(text.strip())) is not None
            ):
                return WatchdogDecision(self.action, reason)
        return allow()


def explain_command_exfiltration(text: str) -> str | None:
    """Return why a shell text looks like exfiltration, as half a sentence, or None."""
    # Most commands use no network. One search saves the decomposition for them.
    if not _PRECHECK.search(text):
        return None
    if (device := _DEVICE.search(text)) and not _LOOPBACK.fullmatch(device[1]):
        return f"the command opens a network connection through {device[0].rsplit('/', 1)[0]}"
    found = split_commands(text)
    # Comparing all parts takes quadratic time, so a long text is reported instead of checked.
    if len(found) > MAX_PARTS:
        return f"the command line has {len(found)} commands, which are too many to check"
    return next(
        (reason for at in range(len(found)) if (reason := _explain_part_exfiltration(at, found)) is not None), None
    )


def _explain_part_exfiltration(at: int, found: Sequence[ApproximateShellCommand]) -> str | None:
    """Return why one command of a text looks like exfiltration, or None."""
    part = found[at]
    if part.program in NETWORK_PROGRAMS and not _is_local_command(part):
        together = [(n, other) for n, other in enumerate(found) if other.pipeline == part.pipeline and n != at]
        before = [other for n, other in together if other.depth > part.depth or (n < at and other.depth == part.depth)]
        return _check_network_program(part, [other for _, other in together], before)
    if part.program == "git":
        return _check_push(part, found)
    return _check_program_text(part) if _INTERPRETERS.fullmatch(part.program) else None


def explain_address_exfiltration(url: str) -> str | None:
    """Return why an address looks like it carries data, as half a sentence, or None."""
    try:
        found = urlsplit(url)
        host = found.hostname or ""
    except ValueError:
        return None
    if _LOOPBACK.fullmatch(host):
        return None
    if (reason := _check_host(host)) is not None:
        return reason
    values = [
        value for _, value in parse_qsl(f"{found.query}&{found.fragment}", keep_blank_values=True, max_num_fields=1000)
    ]
    for value in (*values, found.query, found.fragment):
        # Shorter values are mostly identifiers and tokens of ordinary pages.
        if len(value) >= 48 and _looks_encoded(value):
            return f"the query of the address ({len(value)} characters) looks like encoded data"
    for segment in found.path.split("/"):
        # The limit is higher than for the query, since paths often contain long digests and slugs.
        if len(segment) >= 120 and _looks_encoded(segment):
            return f"the path of the address ({len(segment)} characters) looks like encoded data"
    return None


def _check_network_program(
    part: ApproximateShellCommand,
    together: Sequence[ApproximateShellCommand],
    before: Sequence[ApproximateShellCommand],
) -> str | None:
    program, argv = part.program, part.unwrapped_argv
    for other in before:
        if (reason := _explain_piped_exfiltration(other, part)) is not None:
            return reason
    if (secret := _find_secret_path(list(_words_naming_sent_data(argv)))) is not None:
        return f"{secret} may contain secrets, and {program} would send it"
    reads = any(other.program in _READERS for other in together if other.depth > part.depth)
    for word in _addresses_and_bodies(argv, program):
        if (reason := _explain_sent_content(word, program, reads=reads)) is not None:
            return reason
    return _explain_lookup_exfiltration(argv, program) if program in _NAME_LOOKUPS else None


def _explain_piped_exfiltration(other: ApproximateShellCommand, part: ApproximateShellCommand) -> str | None:
    """Return why the output of another command, sent to a network program, looks like data, or None."""
    program, argv = other.program, other.unwrapped_argv
    into, same_depth = part.program, other.depth == part.depth
    if (secret := _find_secret_path(argv[1:])) is not None:
        return f"{secret} may contain secrets, and its content goes to {into}"
    if _prints_environment(other):
        return f"the environment goes to {into}"
    if into in _WEB_CLIENTS | _RAW_CLIENTS or not same_depth:
        if program in _ENCODERS and not {"-d", "-D", "--decode", "-r"} & set(argv):
            return f"encoded data goes from {program} to {into}"
        if program in _ARCHIVERS and same_depth:
            return f"packed files go from {program} to {into}"
    if into in _RAW_CLIENTS and same_depth and not {"-z", "-l"} & set(part.unwrapped_argv):
        return f"the output of {program or 'a command'} goes to a raw connection of {into}"
    return None


def _explain_sent_content(word: str, program: str, *, reads: bool) -> str | None:
    """Return why an address or a request body looks like data, or None.

    :param reads: a substitution in the command reads a file or the environment
    """
    if SUBSTITUTED in word and reads:
        return f"the content of a file or the environment is put into an address or a body for {program}"
    if (variable := _SECRET_VARIABLE.search(word)) is not None:
        return f"{variable[0]} is put into an address or a body for {program}"
    return explain_address_exfiltration(word) if "://" in word and SUBSTITUTED not in word else None


def _explain_lookup_exfiltration(argv: Sequence[str], program: str) -> str | None:
    """Return why the names that a program looks up look like data, or None."""
    for word in argv[1:]:
        if (
            not word.startswith(("-", "+", "@"))
            and (SUBSTITUTED in word or _SECRET_VARIABLE.search(word))
            and "." in word
        ):
            return f"{program} looks up a host name that is built from other data"
        if (reason := _check_host(word)) is not None:
            return reason
    return None


def _words_naming_sent_data(argv: Sequence[str]) -> Iterator[str]:
    """Return the words of a network program that name what it sends."""
    skip = False
    for word in argv[1:]:
        if skip:
            skip = False
        elif word in _CONNECTION_OPTIONS:
            skip = True
        elif not word.startswith(("--cacert=", "--cert=", "--key=", "--output=", "--header=")):
            yield word


def _addresses_and_bodies(argv: Sequence[str], program: str) -> Iterator[str]:
    """Return the addresses and bodies among the words of a program that fetches."""
    data = False
    for word in _words_naming_sent_data(argv):
        if data or "://" in word or (program in _RAW_CLIENTS | _COPY_PROGRAMS):
            yield word
        elif word.startswith("-d") and len(word) > 2 and not word.startswith("--"):
            yield word[2:]
        elif word.startswith("--") and "=" in word and _DATA_OPTIONS.fullmatch(word.partition("=")[0]):
            yield word.partition("=")[2]
        data = bool(_DATA_OPTIONS.fullmatch(word))


def _find_secret_path(words: Sequence[str]) -> str | None:
    for word in words:
        for piece in (word, word.rpartition("@")[2], word.rpartition("=")[2].lstrip("@<")):
            path = piece.split(";")[0]
            if not path or "://" in path or path.startswith("-") or _HARMLESS.search(path):
                continue
            if _SECRET_FILES.search(path) or _SECRET_NAMES.match(path):
                return path if len(path) <= 100 else quote_text_or_length(path, 100)
    return None


def _prints_environment(part: ApproximateShellCommand) -> bool:
    argv = part.unwrapped_argv
    # With arguments, `env` starts a program and `set` changes options.
    if part.program == "printenv" or (part.program in ("env", "set") and len(argv) == 1):
        return True
    return part.program in ("export", "declare", "typeset") and "-p" in argv[1:]


def _is_local_command(part: ApproximateShellCommand) -> bool:
    """Return whether all hosts that the command names are this machine."""
    # An address with a user name is compared by the host after the `@`, which is the one that is contacted.
    hosts = [m[1] for word in part.unwrapped_argv[1:] if (m := re.match(r"(?:[a-z+]+://)(?:[^/@]*@)?([^/?#]+)", word))]
    if not hosts and part.program in _RAW_CLIENTS | _WEB_CLIENTS | _NAME_LOOKUPS:
        hosts = [word for word in part.unwrapped_argv[1:] if _LOOPBACK.fullmatch(word.partition("/")[0])]
    return bool(hosts) and all(_LOOPBACK.fullmatch(host) for host in hosts)


def _check_push(part: ApproximateShellCommand, found: Sequence[ApproximateShellCommand]) -> str | None:
    words = [word for word in part.unwrapped_argv[1:] if not word.startswith("-")]
    if words[:1] != ["push"]:
        return None
    if len(words) > 1 and _REMOTE.search(words[1]):
        return f"git would push to {quote_text_or_length(words[1], 100)}, which is not a remote of this repository"
    for other in found:
        argv = other.unwrapped_argv
        if other.program == "git" and {"remote", "config"} & set(argv) and {"add", "set-url"} & set(argv):
            return "git would push to a remote that the same command sets"
    return None


def _check_program_text(part: ApproximateShellCommand) -> str | None:
    argv = part.unwrapped_argv
    # Code in an argument can be searched. A file could contain the same, but the sandbox limits what it reaches.
    for flag, text in pairwise(argv):
        if flag in ("-c", "-e", "-r", "-E", "--eval", "eval") and _OPENS_NETWORK.search(text):
            words = re.split(r"[\s'\"(),;=]+", text)
            if (secret := _find_secret_path(words)) is not None:
                return f"{secret} may contain secrets, and the code for {part.program} opens the network"
            if _WHOLE_ENVIRONMENT.search(text):
                return f"the code for {part.program} reads the environment and opens the network"
    return None


def _check_host(host: str) -> str | None:
    labels = host.rstrip(".").split(".")
    if len(labels) > 2:
        # The registered domain is left out: data would be in the labels before it, which its owner's name server sees.
        for label in (max(part.split("-"), key=len) for part in labels[:-2]):
            if len(label) > 50 or (
                len(label) >= 24 and _has_scattered_digits(label) and _character_entropy(label) >= 3.4
            ):
                return f"the host name has a part of {len(label)} characters that looks like encoded data"
        if len(labels) > 6 and sum(len(label) for label in labels[:-2]) > 100:
            return f"the host name has {len(labels)} parts, which looks like encoded data"
    return None


def _looks_encoded(text: str) -> bool:
    if not _ENCODED.fullmatch(text.replace("%3D", "=").replace("%2B", "+").replace("%2F", "/")):
        return False
    if re.fullmatch(r"[0-9a-fA-F-]+", text):
        return len(text) > 128  # digests, cache keys and identifiers are shorter
    if re.fullmatch(r"[A-Z2-7=]+", text):
        return len(text) >= 56 and _character_entropy(text) >= 3.8
    mixed = bool(re.search("[a-z]", text) and re.search("[A-Z]", text) and re.search(r"\d", text))
    return mixed and _character_entropy(text) >= 4.2


def _has_scattered_digits(text: str) -> bool:
    """Return whether the text has digits among its letters, in several places."""
    return len(re.findall(r"[a-z]\d|\d[a-z]", text, re.IGNORECASE)) >= 4


def _character_entropy(text: str) -> float:
    """Return the entropy in bits for each character."""
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


# Secrets in outgoing arguments: registered secrets in any of their forms, and texts with the shape of well-known keys.

_KEY = "[A-Za-z0-9_-]"
KEY_SHAPES: Mapping[str, tuple[str, str]] = {
    "an AWS access key id": ("AKIA", r"[0-9A-Z]{16}\b"),
    "a temporary AWS access key id": ("ASIA", r"[0-9A-Z]{16}\b"),
    "a GitHub token": ("gh", r"[pousr]_[A-Za-z0-9]{36,}"),
    "a fine-grained GitHub token": ("github_pat_", r"[A-Za-z0-9_]{40,}"),
    "a GitLab token": ("glpat-", _KEY + "{20,}"),
    "an Anthropic key": ("sk-ant-", _KEY + "{24,}"),
    "an OpenAI key": ("sk-", rf"(?:proj-|svcacct-)?{_KEY}{{32,}}"),
    "a Slack token": ("xox", r"[abprs]-[A-Za-z0-9-]{20,}"),
    "a Google API key": ("AIza", _KEY + "{35}"),
    "a Stripe key": ("rk_live_", r"[A-Za-z0-9]{20,}"),
    "a secret Stripe key": ("sk_live_", r"[A-Za-z0-9]{20,}"),
    "an npm token": ("npm_", r"[A-Za-z0-9]{36}"),
    "a PyPI token": ("pypi-AgE", _KEY + "{40,}"),
    "a Hugging Face token": ("hf_", r"[A-Za-z0-9]{30,}"),
    "a SendGrid key": ("SG.", rf"{_KEY}{{16,}}\.{_KEY}{{30,}}"),
    "a private key": ("-----BEGIN ", r"(?:[A-Z]+ )*PRIVATE KEY-----"),
    "a JSON web token": (".eyJ", rf"(?<={_KEY}{{10}}\.eyJ){_KEY}{{10,}}\.{_KEY}{{10,}}"),
}
"""For each kind of key, its beginning and its continuation. A beginning with a letter is at the start of a word.

The text is searched for the beginnings. Each continuation is short or one run of characters, so any text is scanned once.
"""


def _compile_shape(begins: str, goes_on: str) -> re.Pattern[str]:
    start = re.escape(begins)
    return compile_regex_lazily(start + (rf"(?<!\w{start})" if begins[0].isalpha() else "") + goes_on)


_COMPILED = tuple((name, begins, _compile_shape(begins, rest)) for name, (begins, rest) in KEY_SHAPES.items())
_PLACEHOLDER = compile_regex_lazily(r"example|xxxx|your|placeholder|dummy|redacted|\.\.\.", re.IGNORECASE)


class OutgoingSecretsWatchdog:
    """A watchdog for secrets in the arguments of calls that leave the workspace.

    :param encode: encodes any value as JSON, without cutting anything
    :param registered: returns whether a JSON text contains a registered secret
    :param action: the decision about such a call
    """

    name = "secrets"

    def __init__(
        self, encode: Callable[[object], bytes], registered: Callable[[bytes], bool], action: Action = "ask"
    ) -> None:
        self._encode = encode
        self._registered = registered
        self.action: Action = action

    def concerns(self, spec: ToolSpec) -> bool:
        """Return whether calls of this tool leave the workspace."""
        return spec.side_effect == "external" or bool(spec.requires.net.hosts or "net.fetch" in spec.effective_targets)

    async def __call__(self, call: WatchdogCall) -> WatchdogDecision:
        # Encoded once for both checks.
        encoded = self._encode(dict(call.arguments))
        if self._registered(encoded):
            return WatchdogDecision(
                self.action, "the arguments contain a registered secret, which the call would send out"
            )
        commands = [value for capability, value in call.targets if capability == "shell.run"]
        if commands and not any([await apply_reader_to_shell_text(_text_uses_network, text) for text in commands]):
            return allow()
        if (what := find_known_key_kind(encoded.decode())) is not None:
            return WatchdogDecision(
                self.action, f"the arguments contain text with the shape of {what}, which the call would send out"
            )
        return allow()


def _text_uses_network(text: str) -> bool:
    """Return whether a command of a shell text may communicate with another machine."""
    programs = NETWORK_PROGRAMS | {"git"}
    return any(part.program in programs for part in split_commands(text))


def find_known_key_kind(text: str) -> str | None:
    """Return the well-known kind of key that ``text`` contains, or None. Placeholders do not count."""
    for name, begins, shape in _COMPILED:
        if begins not in text:
            continue
        for match in shape.finditer(text):
            # Low entropy means a made-up value, as in documentation. The frame of a private key has no random part to
            # measure.
            if name == "a private key" or (not _PLACEHOLDER.search(match[0]) and _character_entropy(match[0]) >= 3.0):
                return name
    return None


# Identical earlier calls that always failed.

INTERRUPTED_FACTOR = 3
"""The factor by which more failures are tolerated if other calls succeed in between."""


class RepeatedFailuresWatchdog:
    """A watchdog for identical calls that have failed repeatedly.

    It is asked only after a failure in the session.

    :param failures: the number of failures in a row; three times as many if other calls succeed in between without changes
    :param action: the decision about such a call
    """

    name = "repeats"
    after_failures = True

    def __init__(self, failures: int = 5, action: Action = "ask") -> None:
        self.failures = failures
        self.action: Action = action

    def concerns(self, spec: ToolSpec) -> bool:
        return True

    async def __call__(self, call: WatchdogCall) -> WatchdogDecision:
        # A loop may alternate with harmless calls that succeed, which would reset a count of consecutive failures.
        if call.consecutive_failures < self.failures and call.previous_failures < INTERRUPTED_FACTOR * self.failures:
            return allow()
        return WatchdogDecision(
            self.action,
            f"exactly this call has failed {call.previous_failures} times in this session. Read the errors and do something else "
            "first: inspect the current state, or change the arguments",
        )
