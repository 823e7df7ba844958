"""Notes for the model on a program that failed because of its sandbox: what happened, why, and what to do.

A program says only what it saw: *Could not resolve host*, *Read-only file system*, *command not found*. :data:`_SIGNS` has
the signs of each kind of failure, for all programs in one place. A note is given only for a program that failed, and it
states what is true of the sandbox, since the same words can have other reasons. A refused host and a protected path are
known exactly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from handrail.contract.protected.path_protection import find_path_protection
from handrail.contract.sandbox_protocol import ConnectionAttempt, PathDenials, Process, SandboxProfile
from handrail.contract.struct import Struct
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.text.neutralisation import escape_terminal_controls
from handrail.contract.tool.requires import CapabilitySet
from handrail.origins.program_lookup import SYSTEM_FOLDERS, find_home_folder, list_path_variable_folders
from handrail.runtime.guard.git_config_checks import find_enclosing_repository
from handrail.runtime.guard.guarded_sandbox import GuardedProcess
from handrail.sandbox.view.toolchains import find_toolchains

_SCANNED_BYTES = 64 * 1024
_MOST_NOTES = 6
_MOST_PROGRAMS = 3

_Failure = Literal["network", "loopback", "read-only", "unix-sockets", "services", "root"]
_SIGNS: dict[_Failure, re.Pattern[bytes]] = {
    "loopback": compile_regex_lazily(
        rb"(?:127\.\d+\.\d+\.\d+|localhost|::1|0\.0\.0\.0)[^\n]{0,200}?"
        rb"(?:refused|Couldn't connect|Could not connect|Failed to connect)"
        rb"|(?:refused|[Ff]ailed to connect|Couldn't connect)[^\n]{0,200}?(?:127\.\d+\.\d+\.\d+|localhost|::1)",
        re.IGNORECASE,
    ),
    "network": compile_regex_lazily(
        rb"could(?:n't| not) resolve|unable to resolve|failed to resolve|cannot resolve|resolution failed"
        rb"|name or service not known|nodename nor servname|failure in name resolution|NameResolutionError"
        rb"|\bENOTFOUND\b|\bEAI_AGAIN\b|\bEAI_NONAME\b|no such host|lookup address information|dns error"
        rb"|network is unreachable|\bENETUNREACH\b|no route to host|\bEHOSTUNREACH\b|UnknownHostException"
        rb"|fai(?:led|lure) to download|network error|error sending request for url|spurious network"
        rb"|\(from versions: none\)|\bfetch failed\b",
        re.IGNORECASE,
    ),
    "read-only": compile_regex_lazily(
        rb"read-only file ?system|\bEROFS\b"
        rb"|['\"\xe2\x80\x98 ]/(?:usr|etc|opt|var|bin|sbin|lib\w*|srv|boot|sys|proc)\b[^\n]{0,200}permission denied"
        rb"|permission denied[^\n]{0,40}['\"\xe2\x80\x98 ]/(?:usr|etc|opt|var|bin|sbin|lib\w*|srv|boot|sys|proc)\b",
        re.IGNORECASE,
    ),
    "unix-sockets": compile_regex_lazily(rb"address family not supported|\bEAFNOSUPPORT\b", re.IGNORECASE),
    "services": compile_regex_lazily(
        rb"cannot connect to the docker daemon|connect[^\n]{0,200}[ '\"(:/](?:/var)?/run/[^\s'\"]+\.(?:sock|s\.PGSQL)"
        rb"|socket [\"'](?:/var)?/run/[^\n]{0,200}(?:failed|no such file)"
        rb"|failed to connect to (?:the )?(?:\w+ )?(?:scope )?bus\b|not been booted with systemd",
        re.IGNORECASE,
    ),
    "root": compile_regex_lazily(
        rb"unable to acquire the dpkg|are you root\?|superuser privileges|(?:must|need to|has to) be (?:run as )?root\b"
        rb"|unless you are root|\"no new privileges\"|effective user id is not 0"
        rb"|\b(?:chown|chgrp|mount|umount|chroot|mknod|setcap|iptables|ping|unshare|su|sudo): [^\n]{0,200}"
        rb"(?:operation not permitted|permission denied)"
        rb"|changing (?:ownership|group) of [^\n]{0,200}(?:operation not permitted|invalid argument)",
        re.IGNORECASE,
    ),
}
"""The words with which programs tell of a failure, in the order of the notes."""
_SILENT = (
    (compile_regex_lazily(r"(?<![\w.-])curl(?![\w.-])"), frozenset((5, 6, 7))),
    (compile_regex_lazily(r"(?<![\w.-])wget(?![\w.-])"), frozenset((4,))),
)
"""Programs that may say nothing, with their exit codes for a host that they did not reach."""
_HIDES_FAILURE = compile_regex_lazily(r"[|;`!\n]|\$\(|(?<![&>])&(?![&>])")
"""A text in which the exit code does not tell whether each command succeeded."""
_QUOTED = compile_regex_lazily(r"'[^']*'|\"[^\"`$]*\"")
_LOOPBACK_NAME = compile_regex_lazily(r"127\.\d+\.\d+\.\d+|localhost|\[?::1\]?|0\.0\.0\.0")
_REFUSED = compile_regex_lazily(rb"connection refused|\bECONNREFUSED\b", re.IGNORECASE)
_PATH_SIGNS = (b"ermission denied", b"ead-only file system", b"evice or resource busy", b"EACCES", b"EROFS", b"EBUSY")
_MISSING_PROGRAM = compile_regex_lazily(
    r"(?:^|[\s:])([\w][\w.+-]*): (?:command )?not found\b"
    r"|\benv: ['\u2018\"]?([\w][\w.+-]*)['\u2019\"]?: No such file"
    r"|\bspawn ([\w][\w.+-]*) ENOENT"
    r"|No such file or directory: '([\w][\w.+-]*)'"
    r"|exec: \"([\w][\w.+-]*)\": executable file not found"
    r"|make: ([\w][\w.+-]*): No such file or directory",
    re.MULTILINE,
)
_MISSING_PATH = compile_regex_lazily(
    r"(?<![^\s:'\"\u2018\u2019])[^\s:'\"\u2018\u2019/]*+(/[^\s:'\"\u2018\u2019]++)['\"\u2019]?: No such file or directory"
    r"|No such file or directory[^\n/]{0,20}['\" ](/[^\s:'\"]+)"
)
_NO_REPOSITORY = compile_regex_lazily(
    rb"not a git repository|does not exist; check \.git/objects/info/alternates|unable to normalize alternate object path"
)
_PRIVATE_FOLDERS = ("/etc", "/tmp", "/dev", "/proc", "/run")  # noqa: S108 - names to compare with
_HOME_PROGRAMS = (
    ".local/bin",
    ".cargo/bin",
    "go/bin",
    ".nvm/versions/node/*/bin",
    ".volta/bin",
    ".bun/bin",
    ".deno/bin",
    ".pyenv/shims",
    "miniconda3/bin",
    "anaconda3/bin",
    ".rbenv/shims",
    ".sdkman/candidates/*/current/bin",
)
"""Folders of a home in which installers put programs."""


class ProgramTermination(Struct, frozen=True):
    """How a program ended, with what its sandbox allowed.

    :param command: its shell text, or its program and arguments
    :param output: what it said last, stderr first of all
    :param attempts: the hosts that it wanted to reach
    """

    command: str
    exit_code: int
    output: bytes
    capabilities: CapabilitySet
    attempts: Sequence[ConnectionAttempt] = ()


def explain_sandbox_denials(process: Process, end: ProgramTermination) -> tuple[str, ...]:
    """Return notes for the model on what the sandbox kept the program from."""
    if not isinstance(process, GuardedProcess):
        return ()
    output_tail = end.output[-_SCANNED_BYTES:]
    notes = [*process.kept_file_notes, *_explain_refused_hosts(end.attempts)]
    paths = [*_explain_paths(process, output_tail)]
    notes += paths
    if (
        _NO_REPOSITORY.search(output_tail) is not None
        and (note := explain_invisible_repository(process.profile)) is not None
    ):
        notes.append(note)
    has_tried = process.unreachable_count > 0 and all(one.refusal_reason is not None for one in end.attempts)
    if end.exit_code != 0 or (has_tried and _HIDES_FAILURE.search(_QUOTED.sub("", end.command)) is not None):
        failures = _find_failures(end, output_tail)
        if has_tried and "loopback" not in failures:  # node also tries routes that it does not need
            failures.add("network")
        if any(one.refusal_reason is not None for one in end.attempts):
            failures.discard("network")
        if end.exit_code == 0:
            failures &= {"network"}
        if paths:
            failures.discard("read-only")
        notes += [_explain_failure(failure, process.profile, end) for failure in _SIGNS if failure in failures]
    if end.exit_code != 0:
        shown = output_tail.decode("utf-8", "replace")
        notes += _explain_missing_programs(shown)
        notes += _explain_outside_paths(shown, process.profile)
    return tuple(dict.fromkeys(notes))[:_MOST_NOTES]


def _explain_refused_hosts(attempts: Sequence[ConnectionAttempt]) -> Iterator[str]:
    for one in attempts:
        if one.refusal_reason is not None:
            missed = "not reached" if "could not be resolved" in one.refusal_reason else "refused"
            yield f"The host {one.host}:{one.port} was {missed}: {one.refusal_reason}"


def _find_failures(end: ProgramTermination, output_tail: bytes) -> set[_Failure]:
    found: set[_Failure] = {failure for failure, sign in _SIGNS.items() if sign.search(output_tail) is not None}
    for program, codes in _SILENT:
        if end.exit_code in codes and program.search(end.command) is not None:
            found.add("loopback" if _LOOPBACK_NAME.search(end.command) else "network")
    if _REFUSED.search(output_tail) is not None:  # elsewhere, the answer is that there is no route
        found.add("loopback")
        if all(sign[0].lower() == b"fetch failed" for sign in _SIGNS["network"].finditer(output_tail)):
            found.discard("network")  # node writes that before each cause
    return found


def _explain_failure(failure: _Failure, profile: SandboxProfile, end: ProgramTermination) -> str:
    match failure:
        case "network":
            return _explain_network(profile, end.capabilities)
        case "loopback":
            return (
                "At 127.0.0.1 and localhost, a program reaches only servers in its sandbox, never those of this machine. "
                f"{_explain_shared_loopback(profile, end.capabilities)}"
            )
        case "read-only" if not profile.workspace_writable:
            return "This call only reads, so everything was read-only for its programs. To write, use a command or a tool that writes."
        case "read-only" if profile.confined:
            return (
                "This call runs confined, so its programs write only in the workspace, in $HOME and in /tmp, and version control "
                "data only if the text of the call has a git command. Write there, run git in a separate call, or ask the user "
                "for a rule that names this command."
            )
        case "read-only":
            return (
                "Programs can write only in the workspace, in $HOME and in /tmp, except for protected names. Write there, or "
                'ask the user to add the folder to [[roots]] of the agent with access = "write".'
            )
        case "unix-sockets":
            return (
                "Programs cannot create Unix sockets. Work without one, for example over 127.0.0.1, or ask the user to set "
                "unix_sockets = true under [sandbox] in handrail.toml."
            )
        case "services":
            return (
                "Programs do not reach the services of this machine through their sockets, such as Docker, databases or systemd. "
                "Continue without the service, or ask the user to run this command outside Handrail."
            )
        case "root":
            return (
                "Programs do not have the rights of root: they cannot install system packages, change owners or mount. Install "
                "into the workspace, for example with npm or with pip in a virtual environment, or ask the user to do it."
            )


def _explain_shared_loopback(profile: SandboxProfile, capabilities: CapabilitySet) -> str:
    if not profile.network:
        return "This call shares them with no other: start the server and its client in one command."
    if capabilities.may_allow_any_target("net.fetch"):
        kind, others = "with hosts", "calls that run confined or without hosts have others"
    else:
        kind, others = "without hosts", "this call runs without hosts, and calls with hosts have others"
    return (
        f"The calls and jobs of this session {kind} share them: {others}. Start the server as a background job of this "
        "session, in the same way as this call, and check that the job still runs and listens on this port."
    )


def _explain_network(profile: SandboxProfile, capabilities: CapabilitySet) -> str:
    if capabilities.may_allow_any_target("net.fetch"):
        return (
            "Programs reach hosts only over HTTP and TLS, through the proxy that http_proxy and https_proxy name, and only "
            "hosts that a rule or the user allows. They have no name server and no other network. Use a client that reads "
            "the proxy from these variables, such as curl, pip, npm or git over https. Node's fetch takes it from Node 22.21 "
            "and 24.5 on."
        )
    return f"This call has no network: {explain_no_network(profile, capabilities)}"


def explain_no_network(profile: SandboxProfile, capabilities: CapabilitySet) -> str:
    """Return why a call has no network, with what to do."""
    if not profile.workspace_writable:
        return "it only reads, and such calls have no network access. To reach a host, use a command that does so, such as curl."
    owner = capabilities.find_owner_denying_all_hosts(is_confined=profile.confined)
    if owner is None:
        return (
            "it runs confined. Continue without it, or ask the user for two rules: one that names the call, such as "
            "`allow bash COMMAND …` or `allow python`, and `allow net.fetch HOST`."
        )
    return f"{owner} has no hosts. Continue without it, or ask the user to allow hosts there."


def _explain_missing_programs(output_text: str) -> Iterator[str]:
    names = dict.fromkeys(name for match in _MISSING_PROGRAM.finditer(output_text) for name in match.groups() if name)
    for name in list(names)[:_MOST_PROGRAMS]:
        if (note := _explain_missing(name)) is not None:
            yield note


def _explain_missing(name: str) -> str | None:
    """Return where a program is on this machine that its sandbox does not show; None if it is nowhere."""
    for folder in list_path_variable_folders():
        if _is_program(Path(folder, name)):
            return (
                f"`{name}` is in {escape_terminal_controls(folder)} on this machine, but it is outside the folders that the "
                "sandbox shows. Use another program, or ask the user to install it below /usr/local or in a separate "
                "installation (a folder with bin and lib) on PATH."
            )
    home = find_home_folder()
    for pattern in _HOME_PROGRAMS if home is not None else ():
        for folder in sorted(Path(home or "").glob(pattern), reverse=True):
            if _is_program(folder / name):
                return (
                    f"`{name}` is in {escape_terminal_controls(str(folder))} on this machine, but this folder is not on the PATH "
                    "with which Handrail was started. Ask the user to add it to PATH and to start Handrail again."
                )
    return None


def _explain_outside_paths(output_text: str, profile: SandboxProfile) -> Iterator[str]:
    """Explain a missing path that no program sees. Whether it exists on this machine is not looked up."""
    home = f"{profile.scratch}/."
    for match in _MISSING_PATH.finditer(output_text):
        path = os.path.normpath(next(filter(None, match.groups())))
        if path.startswith(home):
            shown = f"~/{path.removeprefix(home[:-1])}"
            yield (
                f"`{escape_terminal_controls(shown)}` does not exist for programs: their $HOME is a private folder of this session, "
                "not the home of the user. Continue without the file, or ask the user for what you need from it."
            )
            return
        seen = (
            *SYSTEM_FOLDERS,
            *_PRIVATE_FOLDERS,
            profile.workspace,
            profile.scratch,
            *profile.readable,
            *profile.writable,
            *profile.read_only_roots,
            *find_toolchains(profile.workspace).mounts,
        )
        if not _is_beneath_any(path, seen):
            yield (
                f"`{escape_terminal_controls(path)}` is outside the folders that programs can see: the workspace, $HOME, /tmp and the "
                "system's folders. Use a path there, or ask the user to add the folder to [[roots]] of the agent."
            )
            return


def explain_invisible_repository(profile: SandboxProfile) -> str | None:
    """Return where the repository of a working directory is if programs do not see it, and how the user grants it."""
    if (found := find_enclosing_repository(profile.cwd or profile.workspace)) is None:
        return None
    seen = (profile.workspace, *profile.writable, *profile.read_only_roots)
    if not (unseen := [path for path in (found.work_tree, found.common) if not _is_beneath_any(path, seen)]):
        unseen = [path for path in found.objects if not _is_beneath_any(path, seen)]
    if not unseen:
        return None
    top, common = escape_terminal_controls(found.work_tree), escape_terminal_controls(found.common)
    begin = (
        f"The git repository of `{top}` is outside the workspace, and programs cannot see its git directory `{common}`"
    )
    if not found.is_valid:
        return (
            f"{begin}. That folder is not the repository of this work tree. Do not create another repository here. Ask the user to fix the link in"
            " `.git` (git worktree repair)."
        )
    if found.objects and found.common not in unseen:
        begin = f"The git repository of `{top}` reads objects from folders that programs cannot see"
    grants = {path: '"read"' for path in unseen if not _is_beneath_any(path, [one for one in unseen if one != path])}
    if found.common in unseen:
        also = found.common in grants
        grants[found.common] = '"read", or "write" for commits' if also else '"write" for commits'
    listed = ", and ".join(
        f'path = "{escape_terminal_controls(path)}" with access = {access}' for path, access in grants.items()
    )
    opening = f"open `{top}` as the workspace, or to " if found.work_tree in unseen else ""
    return (
        f"{begin}. Do not create another repository here. Ask the user to {opening}grant the folder in [[roots]] of the agent's "
        f"manifest (agents/NAME/agent.toml), if it is the right one: {listed}."
    )


def _is_beneath_any(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def _is_program(path: Path) -> bool:
    try:
        return path.is_file() and os.access(path, os.X_OK)
    except OSError:
        return False


def _explain_paths(process: GuardedProcess, output_tail: bytes) -> Iterator[str]:
    if not any(sign in output_tail for sign in _PATH_SIGNS):
        return
    profile = process.profile
    top = profile.workspace.rstrip("/") + "/"
    for path in profile.masked:
        shown = path.removeprefix(top)
        if _mentions(output_tail, shown, is_file=Path(path).is_file()):
            yield _explain_hidden(path, escape_terminal_controls(shown), profile.denials)
    for path in profile.pinned:
        shown = path.removeprefix(top)
        if _mentions(output_tail, shown, is_file=Path(path).is_file()):
            yield _explain_read_only(path, shown, process)


def _explain_hidden(path: str, shown: str, denials: PathDenials | None) -> str:
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):  # noqa: PTH110, PTH112, PTH113
        return (
            f"`{shown}` is a FIFO, and opening it would wait forever, so Handrail hides it from programs. "
            "Remove it, or replace it with a regular file."
        )
    if denials is not None and not denials.is_hidden(path) and os.path.isdir(path):  # noqa: PTH112
        return (
            f"The folder `{shown}` is hidden from programs as a whole: it contains too many hidden files to "
            "hide one by one, or Handrail cannot read it. Ask the user to allow reading the files that hold "
            "no secret, or to move the secret ones into another folder."
        )
    return (
        f"`{shown}` is hidden from programs: a rule denies reading it, or it looks like a secret and no "
        f"rule allows it. If programs need it, ask the user for a rule such as 'allow fs.read {shown}'. "
        "A rule that allows a command does not make this file visible to it."
    )


def _explain_read_only(path: str, relative: str, process: GuardedProcess) -> str:
    why, shown = find_path_protection(relative), escape_terminal_controls(relative)
    if path in process.in_use:
        return (
            f"`{shown}` cannot be changed now: {process.in_use[path]} runs with it mounted over. Wait until "
            "that program has ended, or stop it, then call again."
        )
    if process.profile.repositories_read_only and os.path.lexists(f"{path}/HEAD"):
        return (
            f"`{shown}` is read-only for this call, because it runs confined: only a git command in its text changes version "
            "control data, and only without commands that run other code. Run git in a separate call, or ask the user for a rule "
            "that names this command."
        )
    if why is None and any(one == path or one.startswith(f"{path}/") for one in process.shared):
        return (
            f"`{shown}` cannot be written by this program: it is, or contains, files with other names outside "
            "the workspace (hard links). Copy it to a new name to change it. Each start gives some of these "
            "files their own copy, and 'handrail doctor' shows how many are left."
        )
    if why is None:
        return (
            f"`{shown}` cannot be written by programs: a rule denies it. Use another path, or ask the user to "
            "change the rule."
        )
    if why.kind == "vcs":
        return (
            f"`{shown}` {why.description}. Only tools with the capability vcs.config can change it, and bash never has that capability. Work without it"
            " (git push origin BRANCH, git checkout -b NAME --no-track), use "
            "such a tool, or ask the user."
        )
    return why.format_write_denial(shown)


def _mentions(output_tail: bytes, shown: str, *, is_file: bool) -> bool:
    """Return whether an output contains the last two names of a path, and nothing below a file."""
    names = re.escape(os.fsencode("/".join(shown.split("/")[-2:])))
    return re.search(names + b"(?!/)" if is_file else names, output_tail) is not None
