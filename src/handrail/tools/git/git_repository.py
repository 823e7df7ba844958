"""One repository as the tools see it: its location, a safe way to run git in it, its remotes, and git's failures."""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from handrail.contract.errors import ErrorKind, ToolError, decode_text
from handrail.contract.sandbox_protocol import CompletedProcess
from handrail.contract.services.tool_runtime import Runtime, resolve_intended_path, resolve_tool_path
from handrail.contract.struct import Struct
from handrail.contract.text.host_names import ParsedUrl, parse_http_url
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names

# Settings that keep git from running other programs, whatever a repository's configuration says.
#
# A repository's own configuration can name hooks, filters, drivers, helpers and transports. The operator trusts none of it,
# since a repository may come out of an archive. So git runs without the configuration of the person and the machine, with
# Handrail's settings over the repository's (``GIT_CONFIG_COUNT``: they are read last, and git takes the last value of nearly
# all), and with one more setting for each entry of the repository that would run something. If git takes the first value, an
# option on its command line sets it (:mod:`handrail.contract.protected.path_protection`). If a setting is missing here, the sandbox
# still holds.

_MOST_OVERRIDES = 200

_FIXED: Mapping[str, str] = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.editor": ":",
    "core.pager": "cat",
    "core.askPass": "",
    "core.sshCommand": "false",
    "core.alternateRefsCommand": ":",
    "core.quotePath": "false",
    "credential.helper": "",
    "credential.interactive": "false",
    "protocol.ext.allow": "never",
    "protocol.file.allow": "user",
    "commit.gpgSign": "false",
    "tag.gpgSign": "false",
    "push.gpgSign": "false",
    "log.showSignature": "false",
    "merge.verifySignatures": "false",
    "gpg.program": "false",
    # Our command-line options prevent its use. If one is missing, git fails visibly.
    "diff.external": "false",
    "diff.ignoreSubmodules": "dirty",
    "submodule.recurse": "false",
    "fetch.recurseSubmodules": "false",
    "push.recurseSubmodules": "no",
    # Negotiation would fetch first, with a git that lacks our options.
    "push.negotiate": "false",
    "status.submoduleSummary": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "merge.autoStash": "false",
    "i18n.logOutputEncoding": "UTF-8",
    "color.ui": "false",
    "user.useConfigOnly": "true",
    "safe.directory": "*",
    "safe.bareRepository": "explicit",
}
_BY_FORM: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(form, re.DOTALL), value)
    for form, value in (
        (r"filter\..*\.(?:clean|smudge|process)", ""),
        # A failing driver leaves a conflict to resolve. A driver that does nothing would leave a wrong file.
        (r"merge\..*\.driver", "false"),
        (r"diff\..*\.(?:command|textconv)", "false"),
        (r"credential\..*\.helper", ""),
        (r"branch\..*\.mergeoptions", ""),
        (r"gpg\..*\.(?:program|defaultkeycommand)", "false"),
    )
)
"""Pairs of a key, as ``git config --list`` shows it, and the value that runs no program."""
_REQUIRED = compile_regex_lazily(r"filter\..*\.required", re.DOTALL)
_HOOK = compile_regex_lazily(r"hook\.(.*)\.[a-z]+", re.DOTALL)
_FILTER = compile_regex_lazily(r"filter\.(.*)\.(clean|smudge|process)", re.DOTALL)

NO_PROTOCOL = "none"


class GitConfigEntry(NamedTuple):
    """One line of configuration, as git read it.

    :param scope: ``local``, ``worktree``, ``command`` (ours), ``global``, ``system``
    :param value: None for a name without ``=``
    """

    scope: str
    key: str
    value: str | None


def parse_config(listed: bytes) -> tuple[GitConfigEntry, ...]:
    """Parse the output of ``git config --list --show-scope -z``."""
    words = listed.decode("utf-8", "surrogateescape").split("\0")
    found: list[GitConfigEntry] = []
    for scope, entry in zip(words[::2], words[1::2], strict=False):
        key, newline, value = entry.partition("\n")
        found.append(GitConfigEntry(scope, key, value if newline else None))
    return tuple(found)


def is_unsafe_git_version(found: Sequence[GitConfigEntry]) -> bool:
    """Return whether this git ignores our settings, or reads configuration other than the repository's."""
    heeded = any(one.scope == "command" and one.key == "core.hookspath" for one in found)
    return not heeded or any(one.scope in ("global", "system") for one in found)


def find_configured_filters(found: Sequence[GitConfigEntry]) -> frozenset[str]:
    """Return the filters for which the repository's configuration names a program."""
    return frozenset(match[1] for one in found if one.value and (match := _FILTER.fullmatch(one.key)) is not None)


def make_git_environment(
    outermost: str,
    found: Sequence[GitConfigEntry] = (),
    *,
    writing: bool = False,
    protocols: str = NO_PROTOCOL,
) -> dict[str, str]:
    """Return the environment variables for git.

    :param outermost: the folder above which git looks for no repository
    :param found: the repository's configuration
    :param writing: whether to fail if a filter that is not run would change the stored content
    :param protocols: the transports that git may use, such as ``http:https``
    :raises ToolError: ``limit`` if the configuration names too many programs
    """
    settings = [*_FIXED.items(), *dict(_overrides(found, writing=writing)).items()]
    if len(settings) > len(_FIXED) + _MOST_OVERRIDES:
        raise ToolError(
            f"The repository's configuration names more than {_MOST_OVERRIDES} programs. "
            "Ask the user to check its .git/config.",
            kind="limit",
        )
    variables = {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": "/dev/null",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_ALLOW_PROTOCOL": protocols,
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "",
        "SSH_ASKPASS": "",
        "GIT_SSH_COMMAND": "false",
        "GIT_EDITOR": ":",
        "GIT_SEQUENCE_EDITOR": ":",
        "GIT_PAGER": "cat",
        "GIT_MERGE_AUTOEDIT": "no",
        "GIT_TEMPLATE_DIR": "",
        "GIT_ADVICE": "0",
        "GIT_CEILING_DIRECTORIES": posixpath.dirname(outermost),
        "LC_ALL": "C.UTF-8",
        "LANGUAGE": "C",
        "GIT_CONFIG_COUNT": str(len(settings)),
    }
    if not writing:
        variables["GIT_OPTIONAL_LOCKS"] = "0"
    for number, (key, value) in enumerate(settings):
        variables[f"GIT_CONFIG_KEY_{number}"] = key
        variables[f"GIT_CONFIG_VALUE_{number}"] = value
    return variables


def _overrides(found: Sequence[GitConfigEntry], *, writing: bool) -> Iterator[tuple[str, str]]:
    keys = dict.fromkeys(one.key for one in found if one.scope != "command")
    for key in keys:
        for form, value in _BY_FORM:
            if form.fullmatch(key) is not None:
                yield key, value
        if not writing and _REQUIRED.fullmatch(key) is not None:
            yield key, "false"
        if (hook := _HOOK.fullmatch(key)) is not None:
            yield f"hook.{hook[1]}.enabled", "false"
            yield f"hook.{hook[1]}.event", ""
    for name in sorted(find_configured_filters(found)):
        yield f"filter.{name}.required", "true" if writing else "false"


_T = TypeVar("_T")
_SHORT_OUTPUT = 64 * 1024
_FEW = 500
"""The most paths that are processed on the event loop."""
_MOST_SAID = 2_000
_MOST_WORDS = 100_000
_UNKNOWN = compile_regex_lazily(
    r"unknown revision|bad revision|not a valid object name|invalid reference|Not a valid|ambiguous argument|"
    r"invalid object name|not something we can merge|no such ref|did not match any file\(s\) known to git|"
    r"not a tree object|is not a commit|cannot be resolved to branch|invalid upstream|reference is not a tree"
)
_HALF_DONE = compile_regex_lazily(rb"^error: (?:unable to|could not|cannot)", re.MULTILINE)
"""``git checkout`` exits with 0 even if it could not replace a file."""
_CONFIG_IN_USE = compile_regex_lazily(r"config file .*: Device or resource busy")
"""Another program is running, for which the file is mounted."""
_SYSTEM_FILE = compile_regex_lazily(r"/+(?:dev/+(?!null\Z|shm/)|proc/|sys/)")
_IDENTITY = compile_regex_lazily(
    r"tell me who you are|no (?:name|email) was given|empty ident|auto-detect", re.IGNORECASE
)
_NO_IDENTITY = (
    "git has no author name and address. Ask the user to set them where Handrail runs, with "
    "git config --global user.name 'NAME' and git config --global user.email 'ADDRESS' "
    "(or --local for this repository), and to restart Handrail."
)


class GitRepository(Struct, frozen=True):
    """A repository of the workspace, opened for one call.

    :param top: the absolute path of its work tree
    :param outermost: the folder above which git looks for no repository
    :param directory: the absolute path of its git directory
    :param entries: its configuration and ours
    """

    runtime: Runtime
    top: str
    directory: str
    entries: tuple[GitConfigEntry, ...]
    writing: bool
    outermost: str

    @property
    def unrun_filters(self) -> frozenset[str]:
        """The filters whose programs are not run."""
        return find_configured_filters(self.entries)

    def get_config_values(self, key: str) -> list[str]:
        """Return the values of a key in the repository's configuration, in order."""
        return [one.value or "" for one in self.entries if one.key == key and one.scope != "command"]

    async def run_git_command(
        self,
        *words: str,
        stdin: bytes = b"",
        codes: Sequence[int] = (0,),
        variables: Mapping[str, str] | None = None,
        protocols: str = NO_PROTOCOL,
    ) -> CompletedProcess:
        """Run git with these arguments in the work tree.

        :param codes: the exit codes that are not failures
        :param variables: additional environment variables
        :raises ToolError: with git's message, for any other exit code
        """
        environment = make_git_environment(self.outermost, self.entries, writing=self.writing, protocols=protocols)
        done = await run_git_unchecked(self.runtime, self.top, words, {**environment, **(variables or {})}, stdin)
        if done.exit_code not in codes:
            raise await self.make_error_with_hints(words, done)
        if self.writing and not done.exit_code and _HALF_DONE.search(done.stderr):
            error = make_git_error(words, done)
            raise ToolError(
                f"git could not write all files. {error.text}",
                kind=error.kind,
            )
        return done

    async def read_git_output(self, *words: str, stdin: bytes = b"", codes: Sequence[int] = (0,)) -> bytes:
        """Run git and return its standard output."""
        return (await self.run_git_command(*words, stdin=stdin, codes=codes)).output

    # ── paths ────────────────────────────────────────────────────────────────────────────────────

    def to_work_tree_path(self, path: str) -> str:
        """Return a path relative to the work tree.

        :raises ToolError: ``invalid_input`` if the path is outside the work tree
        """
        absolute = resolve_tool_path(self.runtime, path)
        if absolute == self.top:
            return "."
        if not absolute.startswith(self.top.rstrip("/") + "/"):
            raise ToolError(
                f"{path} is outside the repository at {self.display_top_folder}. Pass a file or folder of it.",
                kind="invalid_input",
            )
        return absolute[len(self.top.rstrip("/")) + 1 :]

    def make_pathspecs(self, paths: Iterable[str], besides: Iterable[bytes] = ()) -> list[str]:
        """Return git arguments for exactly these paths, without ``besides``.

        :raises ToolError: ``limit`` if they are too many for one command
        """
        found = [
            f":(top,literal){inner}" if (inner := self.to_work_tree_path(path)) != "." else ":(top)" for path in paths
        ]
        found += [f":(top,exclude,literal){raw.decode('utf-8', 'surrogateescape')}" for raw in besides]
        if sum(map(len, found)) > _MOST_WORDS:
            raise ToolError("The call has too many paths. Pass fewer, or a folder that contains them.", kind="limit")
        return found

    def to_display_path(self, raw: bytes) -> str:
        """Return a path of git's relative to the workspace, in the form to show."""
        path = raw.decode("utf-8", "surrogateescape")
        if not is_beneath(self.top, self.runtime.workdir):
            return escape_terminal_controls(posixpath.relpath(f"{self.top}/{path}", self.runtime.workdir))
        prefix = self.top[len(self.runtime.workdir.rstrip("/")) + 1 :]
        return escape_terminal_controls(f"{prefix}/{path}" if prefix else path)

    @property
    def display_top_folder(self) -> str:
        return escape_terminal_controls(posixpath.relpath(self.top, self.runtime.workdir))

    async def find_rule_hidden_paths(self, paths: Iterable[bytes], most: int) -> set[bytes]:
        """Return the paths that rules hide from programs, whose content git must not show either.

        :param most: the greatest number of ``paths``; many are checked in a thread
        """
        top = f"{self.top}/"
        wanted = await run_in_thread_if_many(
            most, lambda: [top + path.decode("utf-8", "surrogateescape") for path in paths]
        )
        found = await self.runtime.shell.list_hidden_paths(wanted)
        return await run_in_thread_if_many(
            len(found), lambda: {path[len(top) :].encode("utf-8", "surrogateescape") for path in found}
        )

    async def has_git_folder_entry(self, name: str) -> bool:
        """Return whether the git directory has an entry of that name."""
        try:
            await self.runtime.files.stat(f"{self.directory}/{name}")
        except ToolError:
            return False
        return True

    async def run_and_parse_git(self, reader: Callable[[bytes], _T], *words: str) -> _T:
        """Return the result of ``reader`` for a command's output. A long output is read in a thread."""
        return await parse_git_output(await self.read_git_output(*words), reader)

    # ── failures ─────────────────────────────────────────────────────────────────────────────────

    async def make_error_with_hints(self, words: Sequence[str], done: CompletedProcess) -> ToolError:
        """Return git's message as an error, with the most similar names if a name is unknown."""
        message = extract_git_message(done)
        if _IDENTITY.search(message):
            return ToolError(_NO_IDENTITY, kind="unavailable")
        if (
            "filter" in message
            and self.unrun_filters
            and re.search(r"(?:clean|smudge) filter '?[^\n]*'? failed", message)
        ):
            return ToolError(self.make_filter_error_text(message), kind="unavailable")
        if _UNKNOWN.search(message) and (found := await self._unknown_name_error(words, message)) is not None:
            return found
        return make_git_error(words, done)

    def make_filter_error_text(self, what: str) -> str:
        """Return the error text for files that a filter would change."""
        names = ", ".join(sorted(self.unrun_filters)[:5])
        return (
            f"Nothing was done: some of these files need the filter {names}, whose program Handrail does not run ("
            f"{what.splitlines()[0][:200]}). Run git in bash, which the user can approve, or ask the user."
        )

    async def _unknown_name_error(self, words: Sequence[str], text: str) -> ToolError | None:
        environment = make_git_environment(self.outermost, self.entries)
        listing = ("for-each-ref", "--format=%(refname:short)", "--count=2000")
        done = await run_git_unchecked(self.runtime, self.top, listing, environment)
        known = decode_git_output(done.output).split()
        operands = [word for word in words[1:] if word[:1] not in ("-", ":", "") and word in text]
        for operand in operands:
            name = re.split(r"\.\.\.?|[\^~:]|@\{", operand)[0] or operand
            if name in known or (name == "HEAD" and known):
                continue
            near = nearest_names(name, known)
            hint = f"Did you mean {' or '.join(near)}?" if near else "List the branches with git.branches."
            if name == "HEAD":
                hint = "The repository has no commits yet."
            return ToolError(f"Commit, branch or tag {name!r} does not exist. {hint}", kind="invalid_input")
        return None


async def open_repository(
    runtime: Runtime, folder: str, *, writing: bool = False, changes_files: bool = False
) -> GitRepository:
    """Open the repository that contains ``folder``.

    :param changes_files: whether the tool may change any file of the work tree, which then lies in the workspace
    :raises ToolError: ``failed`` if there is none, ``unavailable`` if this git is too old, ``denied`` if its work tree is
        outside the workspace
    """
    place, outermost = resolve_tool_path(runtime, await resolve_intended_path(runtime, folder)), runtime.workdir
    if is_beneath(place, outermost):
        outermost = await _find_outermost_folder(runtime)
    environment = make_git_environment(outermost, writing=writing)
    asked = ("rev-parse", "--path-format=absolute", "--show-toplevel", "--git-dir")
    where, listed = await asyncio.gather(
        run_git_unchecked(runtime, place, asked, environment),
        run_git_unchecked(runtime, place, ("config", "--list", "--show-scope", "-z"), environment),
    )
    if where.exit_code:
        raise _no_repository_error(folder, where)
    if listed.exit_code:
        raise make_git_error(("config",), listed)
    entries = parse_config(listed.output)
    if is_unsafe_git_version(entries):
        raise ToolError(
            "The installed git is too old to prevent a repository's configuration from running programs. "
            "Ask the user to install git 2.32 or later.",
            kind="unavailable",
        )
    for one in entries:
        if one.scope != "command" and _SYSTEM_FILE.match(one.value or "") is not None:
            raise ToolError(
                f"The repository's configuration names {one.value} ({one.key}), which git could read without end. Ask the user "
                "to check its .git/config.",
                kind="failed",
            )
    top, directory = (line.decode("utf-8", "surrogateescape") for line in where.output.split(b"\n")[:2])
    shown = decode_git_output(top.encode("utf-8", "surrogateescape"))
    if not is_beneath(top, runtime.workdir) and not await _is_readable(runtime, top):
        raise ToolError(
            f"The work tree of the repository at {folder} is outside the workspace: {shown} (core.worktree). Ask the user to "
            "open this folder as the workspace.",
            kind="denied",
        )
    if changes_files and not is_beneath(top, runtime.workdir):
        raise ToolError(
            f"The work tree of the repository at {folder} is larger than the workspace: {shown}. This tool would change files "
            "outside the workspace. Ask the user to open this folder as the workspace.",
            kind="denied",
        )
    return GitRepository(runtime, top, directory, entries, writing, outermost)


async def _find_outermost_folder(runtime: Runtime) -> str:
    """Return the workspace, or the folder of the repository around it if the user has granted that folder."""
    folder = runtime.workdir
    while (folder := posixpath.dirname(folder)) != "/":
        if await _is_readable(runtime, folder) and await _is_readable(runtime, f"{folder}/.git"):
            return folder
    return runtime.workdir


async def _is_readable(runtime: Runtime, path: str) -> bool:
    try:
        await runtime.files.stat(path)
    except ToolError:
        return False
    return True


async def run_git_unchecked(
    runtime: Runtime, folder: str, words: Sequence[str], variables: Mapping[str, str], stdin: bytes = b""
) -> CompletedProcess:
    """Run git with these arguments and return the outcome, whatever it is.

    :raises ToolError: ``unavailable`` if git cannot be started
    """
    done = await runtime.shell.run(
        ("git", *words), cwd=folder, stdin=stdin, environment=variables, separate_stderr=True, trusted_program=True
    )
    if done.exit_code in (126, 127) and not done.output:
        raise ToolError(
            f"git could not be started: {extract_git_message(done) or 'git is not installed'}. Ask the user to install it.",
            kind="unavailable",
        )
    return done


def is_beneath(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def check_revision(given: str) -> str:
    """Check a commit, branch or tag, so that git does not take it for an option.

    :raises ToolError: ``invalid_input`` if it begins with ``-``
    """
    if given.startswith("-") or not given.isprintable() or not given.strip():
        raise ToolError(
            f"The revision is invalid: {given!r}. Pass a commit, branch or tag that does not begin with '-'.",
            kind="invalid_input",
        )
    return given


def check_single_commit(given: str) -> str:
    """Check that a revision is one commit, not a range and not a file (``HEAD:path``).

    Rules decide about files by their path.

    :raises ToolError: ``invalid_input`` otherwise
    """
    if ":" in given or ".." in given:
        raise ToolError(
            f"The revision is invalid: {given!r}. Pass one commit, branch or tag without '..' and ':', and files in their "
            "own argument.",
            kind="invalid_input",
        )
    return check_revision(given)


def make_commit_revision(given: str) -> str:
    """Return a revision in the form that git accepts only for a commit.

    Rules are about paths from the top of the work tree. In a tree, paths begin at another folder.

    :raises ToolError: ``invalid_input`` if it is a range, a file or an option
    """
    return f"{check_single_commit(given)}^{{commit}}"


_NETWORK_COMMANDS = frozenset({"clone", "fetch", "ls-remote", "push"})


class GitCommandError(ToolError):
    """A git command failed.

    :param message: git's own message
    """

    def __init__(self, text: str, *, message: str, kind: ErrorKind) -> None:
        super().__init__(text, kind=kind)
        self.message = message


def make_git_error(words: Sequence[str], done: CompletedProcess) -> GitCommandError:
    """Return git's message as an error, with the next step."""
    message = extract_git_message(done) or f"exit code {done.exit_code}, without a message"
    is_locked = ".lock': File exists" in message or _CONFIG_IN_USE.search(message) is not None
    text = f"git {words[0]} failed: {message.rstrip('.')}."
    if done.exceeded_limit is not None:
        text = f"{text} The limit was reached: {done.exceeded_limit}. Do less in one call."
        return GitCommandError(text, message=message, kind="limit")
    if is_locked:
        advice = "Another git process may be running. Wait until it ends, then call again."
    elif "already exists" in message:
        advice = "Choose another name."
    elif words[0] in _NETWORK_COMMANDS:
        advice = "Check the address and the network access, then try again."
    else:
        advice = "Compare the arguments with git.status, and correct the call."
    notes = "".join(f" {note.rstrip('.')}." for note in done.notes)
    kind: ErrorKind = "conflict" if is_locked or "already exists" in message else "failed"
    return GitCommandError(f"{text}{notes} {advice}", message=message, kind=kind)


def extract_git_message(done: CompletedProcess) -> str:
    """Return git's error message without prefixes and hints."""
    lines = decode_git_output(done.stderr or done.output)[-_MOST_SAID:].splitlines()
    kept = [re.sub(r"^(?:fatal|error|warning): ", "", line) for line in lines if not line.startswith("hint:")]
    return "\n".join(kept).strip()


def decode_git_output(raw: bytes) -> str:
    r"""Decode bytes of git. Bytes that are not UTF-8 become ``\xhh``, so that nothing is lost."""
    return decode_text(raw, "backslashreplace")


async def parse_git_output(output: bytes, reader: Callable[[bytes], _T]) -> _T:
    """Return the result of ``reader`` for an output. A long output is read in a thread."""
    return reader(output) if len(output) <= _SHORT_OUTPUT else await asyncio.to_thread(reader, output)


async def run_in_thread_if_many(count: int, work: Callable[[], _T]) -> _T:
    """Return the result of ``work``. With many paths it runs in a thread, so that other calls continue."""
    return await asyncio.to_thread(work) if count > _FEW else work()


def _no_repository_error(folder: str, done: CompletedProcess) -> ToolError:
    message = extract_git_message(done)
    if "must be run in a work tree" in message or "bare repository" in message:
        return ToolError(
            f"{folder} has no work tree: it is in a bare repository or a .git folder. "
            "Pass the folder of a checked-out repository.",
            kind="failed",
        )
    if "not a git repository" in message:
        if done.notes:  # they say where it is
            return ToolError(
                f"{folder} is not in a git repository that tools can access. {' '.join(done.notes)}", kind="failed"
            )
        return ToolError(
            f"{folder} is not in a git repository inside the workspace. "
            "Create one with git.init, or clone one with git.clone.",
            kind="failed",
        )
    return make_git_error(("rev-parse",), done)


# Kinds of remotes: an address on the web, a path, or one that these tools do not reach.

_SCHEME = compile_regex_lazily(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HELPER = compile_regex_lazily(r"[A-Za-z0-9+-]+::")
_SSH = compile_regex_lazily(r"[^/:]+:(?!//)")
_CREDENTIALS = compile_regex_lazily(r"(://)[^/?#]*@")

NO_SSH = (
    "uses SSH, which is not supported: the sandbox has no SSH keys or network route. "
    "Use the HTTPS URL, or ask the user to do it."
)


def classify_git_transport(url: str) -> Literal["web", "path", "ssh", "other"]:
    """Return the kind of transport that git would use for an address."""
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


def parse_web_url(url: str) -> ParsedUrl:
    """Parse a web address without a user name or password.

    :raises ToolError: ``invalid_input`` or ``unavailable``, with the accepted forms
    """
    kind = classify_git_transport(url)
    if kind == "ssh":
        raise ToolError(f"{strip_url_credentials(url)} {NO_SSH}", kind="unavailable")
    if kind == "other":
        raise ToolError(
            f"The transport of {strip_url_credentials(url)} is not supported. Use an HTTPS URL.",
            kind="unavailable",
        )
    try:
        return parse_http_url(url)
    except ValueError as error:
        raise ToolError(str(error), kind="invalid_input") from None


def strip_url_credentials(url: str) -> str:
    """Return an address without the part before its host, which may contain a password."""
    shown = _CREDENTIALS.sub(r"\1", url)
    return shown.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def is_same_web_url(given: str, found: str) -> bool:
    """Return whether two web addresses are equal, without their user names and passwords."""
    try:
        return str(parse_web_url(strip_url_credentials(given))) == str(parse_web_url(strip_url_credentials(found)))
    except ToolError:
        return False
