"""What a text shows about confinement: a command is decidable, destroys nothing, names no protected path, needs no network.

The sandbox confines every program. This proof says that nothing in the words of a command contradicts it, or would be lost
within it. It trusts programs of the workspace as far as their words go, as a user does who lets tests run.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from handrail.contract.protected import path_protection
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.policy.shell import (
    command_wrappers,
    destroying_forms,
    nested_commands,
    program_risks,
    read_only_proof,
    risky_options,
)
from handrail.policy.shell.nested_commands import program_name
from handrail.policy.shell.parser import ShellScript, parse_script
from handrail.policy.shell.simple_commands import ANY_TEXT, SPLIT, is_marked, is_open, show_marks

_MAX_DEPTH = 4


def explain_not_confined(argv: Sequence[str]) -> str | None:
    """Return why a command is not known to stay confined, as half a sentence, or None."""
    return _why_not_confined(tuple(argv), _MAX_DEPTH)


def explain_script_not_confined(script: ShellScript) -> str | None:
    """Return why a shell text is not known to stay confined, or None.

    Redirections are not part of the answer. Rules about files decide them.
    """
    return _why_script_not_confined(script, _MAX_DEPTH)


def _why_script_not_confined(script: ShellScript, depth: int) -> str | None:
    if script.unclear is not None:
        return script.unclear
    for command in script.commands:
        if (reason := _why_not_confined(command.argv, depth)) is not None:
            return reason
        if command.folders != (".",) and (reason := explain_loss_elsewhere(command.argv, command.folders)) is not None:
            return reason
    return None if script.commands else "the command line has no command"


def explain_loss_elsewhere(argv: Sequence[str], folders: Sequence[str]) -> str | None:
    """Return why a command in another folder may remove or replace something, or None."""
    if folders == (".",):
        return None
    for inner in unwrap_executed_commands(argv):
        if (
            program_name(inner) in ("rm", "mv", "unlink", "find")
            or destroying_forms.find_removed_paths(inner)
            or any(destroying_forms.find_replaced_paths(inner))
            or (
                program_name(inner) in risky_options.SHELLS
                and any(re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", word) for word in inner)
            )
        ):
            break
    else:
        return None
    if not folders or any(folder[:1] == "/" or folder[:2] == ".." or ".git" in folder.split("/") for folder in folders):
        return f"{argv[0]} runs in a folder that the command does not name, or outside the workspace"
    return None


@lru_cache(maxsize=512)
def _why_not_confined(argv: tuple[str, ...], depth: int) -> str | None:
    # Each level is a wrapper within a wrapper. Real commands have one or two, so more is an attempt to hide something.
    if depth == 0:
        return "the command runs a command in a command, too deeply nested"
    *_, inner = command_wrappers.split_wrapper_layers(argv)
    # A command that changes nothing needs no further question, whatever its words name.
    if read_only_proof.is_command_provably_read_only(argv):
        return None
    # The shell decides at run time which program this is, so nothing is known about it.
    if not inner or is_marked(inner[0]):
        return "the command does not name the program"
    reason = (
        destroying_forms.explain_irreversible_destruction(inner) or explain_network_need(inner) or _why_protected(inner)
    )
    if reason is not None:
        return reason
    program = program_name(inner)
    check = _CHECKS.get(program)
    if check is not None:
        return check(inner, depth)
    if program in risky_options.SHELLS:
        return _shell(inner, depth)
    if (
        program in command_wrappers.ENVIRONMENT_MANAGERS
        and (at := _find_program_position(inner, ("run", "exec"))) is not None
    ):
        return _why_not_confined(inner[at:], depth - 1)
    risk = program_risks.find_form_risk(inner)
    return None if risk is None else risk.reason


# What a command needs, and what it names.


def explain_network_need(argv: Sequence[str]) -> str | None:
    """Return why a command does nothing useful without a network, as half a sentence, or None."""
    # python -m pip is pip under another name.
    if program_name(argv).startswith("python") and tuple(argv[1:2]) == ("-m",):
        argv = argv[2:]
    program = program_name(argv)
    words = [word for word in argv[1:] if word[:1] != "-"]
    if program == "rsync" and (host := next(filter(_REMOTE.match, words), None)) is not None:
        return f"rsync needs the network for {show_marks(host)}"
    # Handrail gives the calls of a session one loopback, so a server that an earlier call started can be reached.
    if program == "curl" and _names_loopback_alone(argv[1:]):
        return None
    verbs = _NETWORK.get(program)
    if verbs is None or tuple(words[:1]) in _OFFLINE.get(program, ()) or tuple(words[:2]) in _OFFLINE.get(program, ()):
        return None
    if not verbs or any(not verb for verb in verbs if len(argv) == 1):
        return f"{argv[0]} needs the network"
    for verb in verbs:
        if verb and tuple(words[: len(verb.split())]) == tuple(verb.split()):
            return f"{argv[0]} {verb} needs the network"
    return None


def _names_loopback_alone(words: Sequence[str]) -> bool:
    """Return whether the words of curl name only servers in its sandbox, such as one that an earlier call has started.

    Each word has to be such a server, or the value of an option that is data.
    """
    servers = 0
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word[:1] == "-":
            is_value = word in _CURL_DATA_OPTIONS
            # An unknown option may take the next word as its value, so nothing after it can be trusted.
            if not is_value and _CURL_FLAGS.fullmatch(word) is None:
                return False
        elif _LOOPBACK.fullmatch(word):
            servers += 1
        else:
            return False
    return servers > 0


_CURL_DATA_OPTIONS = frozenset(
    ["-X", "--request", "-H", "--header", "-d", "--data", "--json", "-m", "--max-time", "--retry", "--connect-timeout"]
)
_CURL_FLAGS = compile_regex_lazily(
    r"-[sSfvikILG#]+|--(?:silent|show-error|fail|verbose|include|insecure|head|location|get|compressed|retry-connrefused)"
)


_LOOPBACK = compile_regex_lazily(r"(?:https?://)?(?:localhost|127\.0\.0\.1|\[::1\])(?::\d+)?(?:[/?#][^{}]*)?")


def _make_verb_list(text: str) -> tuple[str, ...]:
    return tuple(verb.strip() for verb in text.split(",")) if text else ()


_NODE_NETWORK = _make_verb_list(
    "install, i, in, ci, add, update, up, upgrade, publish, unpublish, deprecate, dist-tag, audit, view, info, outdated, login, create, init, "
    "dlx, search, ping"
)
_PIP_NETWORK = _make_verb_list("install, download, index, search, wheel")
_NETWORK: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "curl",
            "wget",
            "ssh",
            "scp",
            "sftp",
            "ftp",
            "lftp",
            "telnet",
            "nc",
            "ncat",
            "netcat",
            "socat",
            "ping",
            "dig",
            "host",
            "nslookup",
        ),
        (),
    ),
    **dict.fromkeys(
        ("whois", "traceroute", "gh", "glab", "hub", "aws", "gcloud", "gsutil", "az", "kubectl", "helm", "docker"), ()
    ),
    **dict.fromkeys(
        ("podman", "flyctl", "fly", "vercel", "netlify", "heroku", "wrangler", "firebase", "twine", "http", "https"), ()
    ),
    **dict.fromkeys(
        (
            "apt",
            "apt-get",
            "dnf",
            "yum",
            "apk",
            "pacman",
            "brew",
            "port",
            "zypper",
            "snap",
            "pipx",
            "uvx",
            "yt-dlp",
            "aria2c",
            "mongo",
            "mongosh",
            "cpanm",
            "huggingface-cli",
        ),
        (),
    ),
    **dict.fromkeys(
        ("docker-compose", "terraform", "pulumi", "ansible", "ansible-playbook", "mosh", "autossh", "rclone"), ()
    ),
    **dict.fromkeys(("npm", "pnpm", "bun"), _NODE_NETWORK),
    "yarn": ("", *_NODE_NETWORK),
    **dict.fromkeys(("pip", "pip3"), _PIP_NETWORK),
    "uv": _make_verb_list(
        "sync, add, lock, pip install, pip sync, pip compile, tool install, tool run, tool upgrade, publish, python install, self"
    ),
    **dict.fromkeys(
        ("poetry", "pdm", "pipenv", "rye", "pixi"), _make_verb_list("install, add, update, lock, publish, sync, search")
    ),
    **dict.fromkeys(
        ("conda", "mamba", "micromamba"), _make_verb_list("install, create, update, search, env create, env update")
    ),
    "cargo": _make_verb_list("fetch, install, add, update, publish, search, login, yank, owner, generate-lockfile"),
    "go": _make_verb_list("get, install, mod download, mod tidy, mod vendor, work sync"),
    **dict.fromkeys(("gem", "bundle", "bundler"), _make_verb_list("install, update, push, fetch, add, outdated")),
    "composer": _make_verb_list("install, require, update, create-project"),
    "dotnet": _make_verb_list("restore, add, tool install, nuget"),
    "git": _make_verb_list(
        "fetch, pull, push, clone, ls-remote, remote update, remote show, submodule update, lfs pull, lfs fetch, lfs push"
    ),
    "hg": _make_verb_list("pull, push, clone, incoming, outgoing"),
    "playwright": _make_verb_list("install"),
    "mvn": _make_verb_list("deploy, clean deploy"),
    "pod": _make_verb_list("install, update, push, repo"),
    **dict.fromkeys(("flutter", "dart"), _make_verb_list("pub get, pub add, pub upgrade, pub publish")),
    "mix": _make_verb_list("deps.get, deps.update, hex.publish"),
    "rustup": _make_verb_list("update, install, toolchain install, component add, target add"),
    "deno": _make_verb_list("add, install, cache, publish"),
}
"""Programs that need the network: for every sub-command, or for those named."""
_REMOTE = re.compile(r"rsync://|[^/]*:")
_OFFLINE: Mapping[str, frozenset[tuple[str, ...]]] = {
    **dict.fromkeys(
        ("terraform", "tofu"), frozenset({("fmt",), ("validate",), ("version",), ("graph",), ("console",)})
    ),
    "helm": frozenset({("lint",), ("template",), ("create",), ("version",), ("package",)}),
    **dict.fromkeys(("docker", "podman"), frozenset({("compose", "config"), ("compose", "version")})),
    **dict.fromkeys(("docker-compose", "podman-compose"), frozenset({("config",), ("version",)})),
    "kubectl": frozenset({("kustomize",)}),
    "pulumi": frozenset({("version",)}),
}
"""Sub-commands of these programs that need no network."""

_READERS = frozenset(
    {
        "grep",
        "egrep",
        "fgrep",
        "rg",
        "cat",
        "ls",
        "head",
        "tail",
        "wc",
        "diff",
        "find",
        "stat",
        "file",
        "echo",
        "printf",
    }
)


_GIT_WRITES_NAMED = frozenset({"mv", "rm", "restore", "checkout", "init", "clone", "worktree"})


def _why_protected(argv: Sequence[str]) -> str | None:
    """Return why a command names a protected path among its words, or None."""
    program = program_name(argv)
    if program in _READERS or (program == "git" and _GIT_WRITES_NAMED.isdisjoint(argv)):
        return None
    for word in read_only_proof.find_possible_path_words(argv):
        path = posixpath.normpath(word)
        # The sandbox mounts nothing writable there, so the name needs no protection here.
        if path[:1] == "/" or path[:2] == ".." or not (set(path) - {"."}):
            continue
        found = path_protection.find_tool_write_protection(path)
        if found is not None and found.applies_to_programs:
            return f"the word {show_marks(word)!r} names a path that no tool writes"
    return None


# Programs that run other commands.

_Check = Callable[[tuple[str, ...], int], str | None]


def _find_program_position(argv: Sequence[str], verbs: Sequence[str]) -> int | None:
    """Return the position of the program after a verb such as ``run``, or None if an option or nothing is there."""
    at = next((index for index, word in enumerate(argv) if index and word in verbs), None)
    if at is None or any(word[:1] == "-" and word not in command_wrappers.VALUELESS_OPTIONS for word in argv[1:at]):
        return None
    at += 1
    while at < len(argv) and (argv[at] in command_wrappers.VALUELESS_OPTIONS or argv[at] == "--"):
        at += 1
    return at if at < len(argv) and argv[at][:1] != "-" else None


def _shell(argv: tuple[str, ...], depth: int) -> str | None:
    index = 1
    while index < len(argv) and (re.fullmatch(r"-[eunx]+|--", argv[index]) or argv[index : index + 2] == _PIPEFAIL):
        index += 2 if argv[index] == "-o" else 1
    if index < len(argv) and re.fullmatch(r"-[eux]*l?c", argv[index]) and index + 1 < len(argv):
        text = argv[index + 1]
        if program_name(argv) in _OTHER_LANGUAGES:
            return f"{argv[0]} runs a script of another language"
        if text[:1] in ("-", "+"):  # the shell reads it as one more option, and takes a later word as its script
            return f"{argv[0]} {show_marks(text)} is a form that Handrail does not understand"
        if is_marked(text):
            return f"{argv[0]} runs a script that the shell expands"
        return _why_script_not_confined(parse_script(text), depth - 1)
    if (
        index < len(argv)
        and argv[index][:1] not in ("-", "+")
        and not is_open(argv[index])
        and _is_plain_file(argv[index])
    ):
        return None
    return f"{argv[0]} runs its input, or a script that is not simple"


_PIPEFAIL = ("-o", "pipefail")
_OTHER_LANGUAGES = frozenset({"fish", "csh", "tcsh", "pwsh", "powershell", "nu", "xonsh", "elvish", "es", "rc"})
"""Shells whose scripts have another syntax, or which run every script that their options name."""


def _is_plain_file(path: str) -> bool:
    """Return whether a path does not lead to the input of a shell, such as ``/dev/stdin`` or ``fd/0`` in ``/proc/self``."""
    return not {"dev", "proc", "fd", "stdin"} & {*path.split("/")}


def _sourced_file(argv: tuple[str, ...], depth: int) -> str | None:
    """Check a file of commands for the shell itself, such as the one that activates a virtual environment."""
    del depth
    file = "".join(argv[1:2])
    if file and file[0] != "-" and not any(map(is_marked, argv)) and _is_plain_file(file):
        return None
    return f"{program_name(argv)} runs a file that the command does not name"


def _find(argv: tuple[str, ...], depth: int) -> str | None:
    if any(word in ("-fls", "-fprint", "-fprint0", "-fprintf") for word in argv):
        return "find writes the file that an option names"
    for inner in risky_options.iterate_find_exec_commands(argv):
        # Caches are made again by the programs that use them.
        if inner[:1] == ("rm",) and destroying_forms.is_find_limited_to_caches(argv):
            continue
        if (reason := _why_not_confined(inner, depth - 1)) is not None:
            return reason
    return None


def _fd(argv: tuple[str, ...], depth: int) -> str | None:
    for inner in risky_options.iterate_fd_exec_commands(argv):
        if (reason := _why_not_confined(inner, depth - 1)) is not None:
            return reason
    return None


def unwrap_executed_commands(argv: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the commands that a command runs through its wrappers, ``xargs`` or ``find``; the command alone if it is none of them."""
    *_, inner = command_wrappers.split_wrapper_layers(argv)
    program = program_name(inner)
    if program in ("xargs", "gxargs") and not isinstance(found := _command_of_xargs(tuple(inner)), str):
        return [found]
    if program in ("find", "gfind", "bfs"):
        return list(risky_options.iterate_find_exec_commands(inner)) or [tuple(inner)]
    if program in ("fd", "fdfind"):
        return list(risky_options.iterate_fd_exec_commands(inner)) or [tuple(inner)]
    return [tuple(inner)]


def _xargs(argv: tuple[str, ...], depth: int) -> str | None:
    command = _command_of_xargs(argv)
    if isinstance(command, str):
        return command
    return _why_not_confined(command, depth - 1) if command else None


def _command_of_xargs(argv: tuple[str, ...]) -> tuple[str, ...] | str:
    """Return the command of ``xargs`` with marks for its input, or why it is not understood, as half a sentence."""
    index = 1
    replaced = ""
    while index < len(argv) and argv[index][:1] == "-":
        word = argv[index]
        if word in ("-n", "-P", "-L", "-d", "-s", "-E", "-a"):
            index += 2
        elif word == "-I":
            replaced = argv[index + 1] if index + 1 < len(argv) else ""
            index += 2
        elif word[:2] == "-I":
            replaced = word[2:]
            index += 1
        elif re.fullmatch(r"-[0rtx]+|-[nPLsd].+|--null|--no-run-if-empty|--max-(?:args|procs|lines)=\d+", word):
            index += 1
        else:
            return f"xargs {word} is a form that Handrail does not understand"
    command = argv[index:]
    if not command:
        return ()
    # The words from the input are unknown, so marks stand for them, as for an expansion of the shell.
    return tuple(word.replace(replaced, ANY_TEXT) for word in command) if replaced else (*command, SPLIT)


_MAX_RUNNER_WORDS = 40


def _runner(argv: tuple[str, ...], depth: int) -> str | None:
    """Check a program whose words are commands, as a text each or together, such as ``hyperfine 'make test'``."""
    if len(argv) > _MAX_RUNNER_WORDS:
        return f"{argv[0]} has too many words"
    for index, word in enumerate(argv[1:], 1):
        text = word.partition("=")[2] if word[:1] == "-" else word
        if is_marked(word):
            return f"{argv[0]} runs a command that the command line does not name"
        if not text or text.isdigit():
            continue
        script = parse_script(text)
        if not script.commands and re.fullmatch(r"\w+=[\w,:%.-]*", text):
            continue  # the value of an option, such as ``trace=openat``
        together = argv[index:] if word[:1] != "-" else ("true",)
        # Such a program takes its command as one text or as several words. Both readings must be harmless.
        for inner in (together, *(command.argv for command in script.commands)):
            if destroying_forms.find_removed_paths(inner) or any(destroying_forms.find_replaced_paths(inner)):
                return f"{argv[0]} may run {program_name(inner)}, which removes or replaces files"
        if word[:1] != "-" and index + 1 < len(argv) and text.isidentifier():
            script = parse_script("true")  # alone, it is no command of this text
        reason = _why_script_not_confined(script, depth - 1) or _why_not_confined(tuple(together), depth - 1)
        if reason is None and script.files:
            reason = f"{argv[0]} runs a command that opens {script.files[0].target!r}"
        if reason is not None:
            return reason
    return None


def _python(argv: tuple[str, ...], depth: int) -> str | None:
    del depth
    if any(map(is_open, argv[1:2])):
        return f"{argv[0]} may run a script that the shell expands"
    risk = risky_options.find_interpreter_risk(program_name(argv), argv)
    return None if risk is None else risk.reason


def _sed(argv: tuple[str, ...], depth: int) -> str | None:
    del depth
    plain: list[str] = []
    for word in argv:
        match = _IN_PLACE.fullmatch(word)
        if match is None:
            plain.append(word)
        elif match.group("letters"):
            plain.append(f"-{match.group('letters')}")
    risk = risky_options.find_sed_risk(plain)
    return None if risk is None else risk.reason


_IN_PLACE = compile_regex_lazily(r"-(?P<letters>[nErsuz]*)i.*|--in-place(?:=.*)?")


_MAKES_FROM_TEXT = frozenset({"-E", "-", "-f-", "--file=-", "--makefile=-", "/dev/stdin"})


def _make(argv: tuple[str, ...], depth: int) -> str | None:
    del depth
    for word in argv[1:]:
        name = word.partition("=")[0]
        if (
            "=" in word
            and word[:1] != "-"
            and (name.upper() == "SHELL" or not command_wrappers.is_harmless_variable(name.rstrip(":+?")))
        ):
            return f"make {name}=… sets the commands of its recipes"
    unknown = [word for word in argv[1:] if is_open(word) and not risky_options.is_job_count(word)]
    if unknown or any(word.startswith("--eval") or word in _MAKES_FROM_TEXT for word in argv[1:]):
        return "make runs a rule that the command does not name"
    return None


def _git(argv: tuple[str, ...], depth: int) -> str | None:
    del depth
    risk = risky_options.find_git_command_risk(_without_patch_folder(argv))
    return None if risk is None else risk.reason


def _without_patch_folder(argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``git format-patch`` without the folder that it writes new files to, if the text names one below."""
    at = destroying_forms.find_git_command_index(argv)
    if at is None or argv[at] != "format-patch" or "-o" not in argv[at:-1]:
        return argv
    option = argv.index("-o", at)
    folder = argv[option + 1]
    if is_marked(folder) or folder[:1] in ("/", "-") or ".." in folder.split("/"):
        return argv
    return (*argv[:option], *argv[option + 2 :])


def _env(argv: tuple[str, ...], depth: int) -> str | None:
    """Check ``env`` with options, or with variables by which programs find what they run."""
    at = 1
    while at < len(argv):
        word = argv[at]
        name, sign, value = word.partition("=")
        if word in ("-u", "--unset"):
            at += 1
        elif word not in ("-i", "-", "--ignore-environment") and name != "--unset" and not re.fullmatch("-u.+", word):
            if not sign or not name.isidentifier():
                break
            # Variables such as GIT_PAGER or EDITOR are commands for the program that reads them.
            if _DESTROYING_WORDS.search(value) is not None or _REPOSITORY.search(value) is not None:
                return f"env sets {name}, whose value may name a command"
        at += 1
    inner = argv[at:]
    if inner[:1] and inner[0][:1] == "-":
        return f"env {show_marks(inner[0])} is a form that Handrail does not understand"
    if destroying_forms.find_removed_paths(inner) or any(destroying_forms.find_replaced_paths(inner)):
        return f"env runs {program_name(inner)}, which removes or replaces files"
    return _why_not_confined(inner, depth - 1) if inner else None


def _npx(argv: tuple[str, ...], depth: int) -> str | None:
    at = 1
    offline = False
    while at < len(argv) and argv[at][:1] == "-":
        if argv[at] not in ("--no-install", "--no", "--offline", "--quiet", "-q", "--"):
            return f"{argv[0]} {argv[at]} is a form that Handrail does not understand"
        offline = offline or argv[at] in ("--no-install", "--no", "--offline")
        at += 1
    if not offline and at < len(argv) and _FETCHED_PACKAGE.search(argv[at]) is not None:
        return f"{argv[0]} needs the network for {show_marks(argv[at])}"
    return _why_not_confined(argv[at:], depth - 1) if at < len(argv) else None


_FETCHED_PACKAGE = compile_regex_lazily(r".@|(?:\A|/)create-|://|\Agithub:|\Adegit\Z|[\x01-\x04]")
"""A package that ``npx`` fetches: one with a version or an address, or one that creates projects. Any other is a program of the project."""


def _package_runner(argv: tuple[str, ...], depth: int) -> str | None:
    if argv[1:2] == ("exec",) and argv[0] in ("pnpm", "yarn") and len(argv) > 2 and argv[2][:1] != "-":
        return _why_not_confined(argv[2:], depth - 1)
    risk = risky_options.find_package_runner_risk(argv)
    return None if risk is None else risk.reason


def _shell_variables(argv: tuple[str, ...], depth: int) -> str | None:
    del depth
    if argv in (("set", "-a"), ("set", "+a"), ("set", "-o", "allexport"), ("set", "+o", "allexport")):
        return None  # the sandbox limits what a program does with a variable
    risk = program_risks.find_hidden_program_risk(argv)
    return None if risk is None else risk.reason


_find_cmake_command = risky_options.make_single_dash_check("runs a program or script", "-E", "-P")


def _cmake(argv: tuple[str, ...], depth: int) -> str | None:
    """Check ``cmake`` for commands. The sandbox limits a compiler or script that a setting names."""
    del depth
    risk = _find_cmake_command(argv)
    return None if risk is None else risk.reason


def _find_no_problem(argv: tuple[str, ...], depth: int) -> str | None:
    del argv, depth


_CHECKS: Mapping[str, _Check] = {
    **dict.fromkeys(("find", "gfind", "bfs"), _find),
    **dict.fromkeys(("fd", "fdfind"), _fd),
    **dict.fromkeys(("xargs", "gxargs"), _xargs),
    **dict.fromkeys(("python", "python3"), _python),
    **dict.fromkeys(("sed", "gsed"), _sed),
    **dict.fromkeys(("source", "."), _sourced_file),
    **dict.fromkeys(("make", "gmake"), _make),
    **dict.fromkeys(
        (
            "hyperfine",
            "watch",
            "multitime",
            "strace",
            "ltrace",
            "valgrind",
            "perf",
            "heaptrack",
            "xvfb-run",
            "concurrently",
        ),
        _runner,
    ),
    "git": _git,
    "cmake": _cmake,
    "env": _env,
    "npx": _npx,
    **dict.fromkeys(("npm", "pnpm", "yarn", "bun"), _package_runner),
    **dict.fromkeys(("export", "read", "[", "[[", "test", "set"), _shell_variables),
    **dict.fromkeys(
        ("sort", "uniq", "xxd", "tree", "shuf", "iconv", "date", "unset", "local", "kill", "wait"), _find_no_problem
    ),
}


# Texts that are not understood, and version control.


def explain_possible_destruction(script: ShellScript, text: str) -> str | None:
    """Return which words of a text that is not understood may destroy something, or None. When in doubt, there is a reason."""
    for command in script.commands:
        if (
            reason := destroying_forms.explain_irreversible_destruction(
                command_wrappers.split_wrapper_layers(command.argv)[-1]
            )
        ) is not None:
            return reason
    # Quotes can split a word that the shell joins again, as in r""m.
    bare = _QUOTES.sub("", text)
    if (match := _DESTROYING_WORDS.search(bare)) is not None:
        return f"the command contains {match.group().strip()!r}, which Handrail does not understand"
    if (match := _REPOSITORY.search(bare)) is not None:
        return f"the command names {match.group()!r}, which Handrail does not understand"
    for word in _SEPARATORS.split(bare):
        path = posixpath.normpath(word) if word else ""
        if (
            path
            and path[:1] != "/"
            and set(path) - {"."}
            and path_protection.find_tool_write_protection(path) is not None
        ):
            return f"the command names {word!r}, a path that no tool writes, which Handrail does not understand"
    return None


_QUOTES = compile_regex_lazily(r"['\"\\]")
_SEPARATORS = compile_regex_lazily(r"[\s;|&()<>`{}$!,=:]+")
_NAMES = "|".join(sorted((re.escape(name) for name in destroying_forms.PROGRAM_NAMES - {"git", "find", "sed", "tar", "cp", "tee", "ln", "install", "kill", "pkill", "killall", "awk", "gawk"}), reverse=True))  # fmt: skip
_DESTROYING_WORDS = compile_regex_lazily(
    rf"(?<![\w.-])(?:{_NAMES})(?![\w-])|-delete\b|--delete|>\||(?<![>&<])>(?!>|&)\s*[^\s&/]|\bof="
    r"|\b(?:clean|reset|checkout|restore|stash|switch|reflog|gc|prune|update-ref|filter-branch|filter-repo)\b|\s-D\b|--force|\s-f\b"
    r"|\b(?:rmtree|unlink|rmdir|removedirs|remove|rmSync|unlinkSync|rmdirSync|truncate|rename|replace|writeFile|write_text|write_bytes|fs\.rm"
    r"|shutil|os\.system|subprocess|popen|exec|eval|base64|xxd|decode|fromhex|chr)\b|\\x|\$'|\bsystem\s*\(|\bgetline\b|\binplace\b",
    re.IGNORECASE,
)
_REPOSITORY = compile_regex_lazily(r"\.(?:git|hg|svn|jj)\b", re.IGNORECASE)


def changes_repository(script: ShellScript) -> bool:
    """Return whether a command of a text writes data of a version control system."""
    return any(_writes_repository(command.argv) for command in script.commands)


def _writes_repository(argv: Sequence[str]) -> bool:
    *_, inner = command_wrappers.split_wrapper_layers(argv)
    if not inner or read_only_proof.is_command_provably_read_only(inner):
        return False
    if program_name(inner) in _VERSION_CONTROL:
        return True
    form = nested_commands.find_nested_command_form(program_name(inner))
    return form is not None and any(
        program_name((piece,)) in _VERSION_CONTROL for word in inner[1:] for piece in _SEPARATORS.split(word) if piece
    )


_VERSION_CONTROL = frozenset({"git", "hg", "jj", "svn", "bzr", "fossil", "sl", "gt"})
