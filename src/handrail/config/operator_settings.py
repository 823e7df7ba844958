"""All settings, with their meaning and their defaults: the one list behind files, variables and flags."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from handrail.catalog.view import CatalogOptions
from handrail.config.mcp_settings import SERVER_NAME_PATTERN as SERVER_NAME
from handrail.config.mcp_settings import McpServeSettings, PrefixedSecretReference, UpstreamServerSettings
from handrail.contract.permission_modes import DEFAULT_MODE, Mode
from handrail.contract.protected.path_protection import WORKSPACE_FILE
from handrail.contract.rule_forms import RuleInput
from handrail.contract.sandbox_protocol import SandboxLimits
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.operator_tool_settings import ToolSettings
from handrail.contract.tool.requires import Requires
from handrail.store.database.sqlite_connection import BUILT_IN_ENGINE as OWN_STORE

FILE_NAME = WORKSPACE_FILE
_HOUR_MS = 3_600_000
_WEEK_MS = 7 * 24 * _HOUR_MS
MACHINE_SANDBOX = "machine"
"""``[sandbox] provider`` for the confinement of the operating system."""
_BARE = compile_regex_lazily(r"[A-Za-z0-9_-]+")
"""A part of a key that TOML accepts without quotes."""
_MIB = 1024 * 1024
_MAX_COUNT = 2**31 - 1


SHIPPED_WATCHDOGS: tuple[Literal["exfiltration", "secrets", "repeats"], ...] = ("exfiltration", "secrets", "repeats")
"""The built-in watchdogs, which are on by default."""


class _SettingsTable(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class LimitSettings(_SettingsTable):
    """``[limits]``: limits of every call."""

    lock_wait_ms: Annotated[
        int,
        Field(
            gt=0,
            le=_WEEK_MS,
            description=(
                "Maximum wait for the locks of a call, in milliseconds. Default 60000 (1 minute), from 1 to 604800000."
            ),
        ),
    ] = 60_000
    grace_ms: Annotated[
        int,
        Field(
            gt=0,
            le=_HOUR_MS,
            description=(
                "Time for a stopped call to end by itself, in milliseconds; then it is killed. Default 5000, "
                "from 1 to 3600000."
            ),
        ),
    ] = 5_000
    tool_session_idle_ms: Annotated[
        int,
        Field(
            gt=0,
            le=_WEEK_MS,
            description=(
                "Time after which an unused session of a stateful tool is closed, in milliseconds. Default "
                "900000 (15 minutes), from 1 to 604800000."
            ),
        ),
    ] = 900_000
    open_tool_sessions: Annotated[
        int,
        Field(
            gt=0,
            le=1_000,
            description=(
                "Maximum number of open sessions of stateful tools in one session. Default 32, from 1 to 1000."
            ),
        ),
    ] = 32
    job_output_mib: Annotated[
        int,
        Field(
            gt=0,
            le=_MAX_COUNT,
            description=(
                "Maximum disk space for the outputs of all jobs of a workspace, in MiB. Beyond it, the "
                "outputs of the jobs that ended first are deleted. Default 1024, at least 1."
            ),
        ),
    ] = 1024
    output_files_mib: Annotated[
        int,
        Field(
            gt=0,
            le=_MAX_COUNT,
            description=(
                "Maximum disk space for the full texts of truncated outputs, in MiB. Beyond it, the oldest "
                "files of sessions that are not in use are deleted. Default 1024, at least 1."
            ),
        ),
    ] = 1024


class ApprovalSettings(_SettingsTable):
    """``[approvals]``: the validity of approval requests and approvals."""

    request_days: Annotated[
        int, Field(gt=0, le=3650, description="Validity of an approval request, in days. Default 7, from 1 to 3650.")
    ] = 7
    grant_hours: Annotated[
        int,
        Field(
            gt=0,
            le=87600,
            description="Validity of an approval that was not used, in hours. Default 24, from 1 to 87600.",
        ),
    ] = 24


class SandboxSettings(_SettingsTable):
    """``[sandbox]``: resource limits for the programs of a call, and exceptions from their confinement."""

    provider: Annotated[
        str,
        Field(
            min_length=1,
            description=(
                "Sandbox provider: machine for that of the operating system, or the name of one in an "
                "installed package. Default machine."
            ),
        ),
    ] = MACHINE_SANDBOX
    cpu_s: Annotated[
        int,
        Field(
            ge=0,
            le=_MAX_COUNT,
            description="Maximum CPU time of each process, in seconds; 0 for no limit. Default 3600.",
        ),
    ] = 3600
    memory_mib: Annotated[
        int,
        Field(
            ge=0,
            le=_MAX_COUNT,
            description="Maximum private memory of each process, in MiB; 0 for no limit. Default 8192.",
        ),
    ] = 8192
    call_memory_mib: Annotated[
        int,
        Field(
            ge=0,
            le=_MAX_COUNT,
            description=(
                "Maximum memory of all processes of one call together, including shared memory, in MiB; 0 "
                "for no limit. Never more than three quarters of the machine's memory. Default 16384."
            ),
        ),
    ] = 16384
    processes: Annotated[
        int,
        Field(
            ge=0,
            le=_MAX_COUNT,
            description="Maximum number of processes and threads of one call together; 0 for no limit. Default 2048.",
        ),
    ] = 2048
    file_mib: Annotated[
        int,
        Field(
            ge=0,
            le=_MAX_COUNT,
            description="Maximum size of a file that a program writes, in MiB; 0 for no limit. Default 16384.",
        ),
    ] = 16384
    open_files: Annotated[
        int,
        Field(
            ge=0,
            le=_MAX_COUNT,
            description="Maximum number of open files of a process; 0 for the limit of the system. Default 4096.",
        ),
    ] = 4096
    tmp_mib: Annotated[
        int,
        Field(
            gt=0, le=_MAX_COUNT, description="Size of the private /tmp of each call, in MiB. Default 256, at least 1."
        ),
    ] = 256
    shm_mib: Annotated[
        int,
        Field(
            gt=0,
            le=_MAX_COUNT,
            description="Size of the private /dev/shm of each call, in MiB. Default 64, at least 1.",
        ),
    ] = 64
    unix_sockets: Annotated[
        bool,
        Field(
            description=(
                "Permission for programs to create Unix sockets, through which they can reach every server "
                "that listens in the workspace. Default false."
            )
        ),
    ] = False
    without: Annotated[
        tuple[Literal["landlock", "seccomp"], ...],
        Field(
            description=(
                "Sandbox layers that may be missing on this machine: landlock, seccomp. Programs then run "
                "without them, and every result reports it; an available layer is always used. Default none."
            )
        ),
    ] = ()
    unconfined: Annotated[
        tuple[str, ...],
        Field(
            description=(
                "IDs of tools whose programs run without any sandbox, with all of your permissions. Every "
                "result and log record of these tools reports it. Default none."
            )
        ),
    ] = ()

    @property
    def limits(self) -> SandboxLimits:
        return SandboxLimits(
            cpu_s=self.cpu_s or None,
            memory_bytes=self.memory_mib * _MIB or None,
            call_memory_bytes=self.call_memory_mib * _MIB or None,
            processes=self.processes or None,
            file_bytes=self.file_mib * _MIB or None,
            open_files=self.open_files or None,
            tmp_bytes=self.tmp_mib * _MIB,
            shm_bytes=self.shm_mib * _MIB,
        )


_PASSED_NAME = compile_regex_lazily(r"[A-Za-z_][A-Za-z0-9_]*")
_SET_BY_SANDBOX = compile_regex_lazily(
    r"(?:PATH|HOME|TMPDIR|SHELL|IFS|ENV|NODE_USE_ENV_PROXY|(?:LD_|DYLD_|BASH|HANDRAIL).*|.*_proxy)", re.I
)
_SECRET_NAME = compile_regex_lazily(
    r"(?:.*_)?(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|(?:ACCESS|PRIVATE|SECRET|SIGNING)_KEY|CREDENTIALS?)",
    re.I,
)


class EnvironmentSettings(_SettingsTable):
    """``[env]``: variables of your environment that programs get."""

    # `pass` is a word of Python, so the field cannot be written as an attribute.
    locals()["__annotations__"] = {
        "pass": Annotated[
            tuple[str, ...],
            Field(
                description=(
                    "Names of environment variables that the programs of bash, python and terminals get with their "
                    "current values, such as JAVA_HOME or NODE_OPTIONS. Default none."
                )
            ),
        ]
    }
    locals()["pass"] = ()

    @property
    def passed_variable_names(self) -> tuple[str, ...]:
        return getattr(self, "pass")

    @model_validator(mode="after")
    def _check_names(self) -> EnvironmentSettings:
        for name in self.passed_variable_names:
            if _PASSED_NAME.fullmatch(name) is None:
                raise ValueError(f"{name!r} is not the name of a variable. Use letters, digits and underscores.")
            if _SET_BY_SANDBOX.fullmatch(name) is not None:
                raise ValueError(f"the variable {name} is set by the sandbox. Remove it from the list.")
            if _SECRET_NAME.fullmatch(name) is not None:
                raise ValueError(
                    f"the variable {name} looks like a secret, which programs of a model do not get. Declare it under "
                    "[secrets], and let a tool require it."
                )
        return self


class StateSettings(_SettingsTable):
    """``[state]``: the kind of database. ``--state`` and ``HANDRAIL_STATE`` set its folder."""

    store: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
            description=(
                "Database for workspaces without one: sqlite, or the name of a store in an installed "
                "package. Default sqlite."
            ),
        ),
    ] = OWN_STORE


class UndoSettings(_SettingsTable):
    """``[undo]``: the copies of workspace files that ``handrail undo`` restores."""

    enabled: Annotated[
        bool,
        Field(
            description=(
                "Whether Handrail keeps the files that a call may change, so that the call can be undone. Default true."
            )
        ),
    ] = True
    max_mib: Annotated[
        int,
        Field(
            gt=0,
            le=_MAX_COUNT,
            description=(
                "Maximum disk space for the kept files of a workspace, in MiB. Beyond it, Handrail forgets the oldest "
                "calls. Default 2048, at least 1."
            ),
        ),
    ] = 2048
    file_mib: Annotated[
        int,
        Field(gt=0, le=_MAX_COUNT, description="Maximum size of a file that is kept, in MiB. Default 256, at least 1."),
    ] = 256
    files: Annotated[
        int,
        Field(
            gt=0,
            le=_MAX_COUNT,
            description=(
                "Maximum number of files of a workspace that are kept. Large folders that tools create again, such as "
                "node_modules, are left out. Default 50000, at least 1."
            ),
        ),
    ] = 50_000
    keep_ms: Annotated[
        int,
        Field(
            gt=0,
            le=_HOUR_MS,
            description=(
                "Maximum time to copy files before a program starts, in milliseconds. The next programs copy the rest. "
                "Default 3000, from 1 to 3600000."
            ),
        ),
    ] = 3_000


class SearchSettings(_SettingsTable):
    """``[search]``: semantic search for tools."""

    embedder: Annotated[
        str,
        Field(
            min_length=1,
            description=(
                "Embedder that encodes texts for semantic search: local (a small model on this machine), "
                "endpoint, fastembed, the name of an embedder in an installed package, or none. Default "
                "local."
            ),
        ),
    ] = "local"
    url: Annotated[
        str,
        Field(
            pattern=r"^(https?://[^\s@]+)?$",
            description=(
                "Only for endpoint: base URL of a server with OpenAI's POST /embeddings, without "
                "/embeddings. Handrail sends it descriptions of tools and search queries. Required for "
                "endpoint."
            ),
        ),
    ] = ""
    model: Annotated[str, Field(description="Only for endpoint and fastembed: name of the model.")] = ""
    secret: Annotated[
        str, Field(description="Only for endpoint: name of the secret with the API key. Default none.")
    ] = ""


class CatalogSettings(_SettingsTable):
    """``[catalog]``: the tools and texts that a model gets."""

    index_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description=(
                "Approximate maximum number of tokens for the names of deferred tools in the system prompt; "
                "0 to leave them out. Default 1000, at most 1000000."
            ),
        ),
    ] = 1_000
    preload: Annotated[
        int,
        Field(
            ge=0,
            le=50,
            description=(
                "Maximum number of tools that are loaded by a search for the user's message before the "
                "model's turn; 0 for none. Default 0, at most 50."
            ),
        ),
    ] = 0
    preload_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description=(
                "Approximate maximum number of tokens for these tools together. Default 2000, at most 1000000."
            ),
        ),
    ] = 2_000
    categories: Annotated[
        dict[str, str],
        Field(
            description=(
                "Descriptions of tool categories for models, by category name: your own categories and those "
                "of third-party sources. The descriptions of built-in categories are fixed."
            )
        ),
    ] = {}

    def to_catalog_options(self, core: tuple[str, ...]) -> CatalogOptions:
        """Return the options in the form for a catalog.

        :param core: the core tools of an agent's manifest
        """
        texts = tuple(self.categories.items())
        return CatalogOptions(core, texts, self.index_tokens, self.preload, self.preload_tokens)


class LanguageServerSettings(_SettingsTable):
    """``[language_servers.LANGUAGE]``: the server that answers questions of ``lsp`` about a language."""

    command: Annotated[
        tuple[str, ...],
        Field(
            description=(
                "Program and arguments of the server, which speaks the protocol over stdin and stdout. Default for python, "
                "typescript, c and go: the known servers, if they are installed."
            )
        ),
    ] = ()
    files: Annotated[
        tuple[str, ...],
        Field(
            description="Patterns for the names of the language's files, as in ['*.rs']. Default: those of the language."
        ),
    ] = ()
    folders: Annotated[
        tuple[str, ...],
        Field(
            description=(
                "Further folders that the server can read, such as a cache of downloaded packages. Default: its installation."
            )
        ),
    ] = ()
    enabled: Annotated[bool, Field(description="Whether the language has a server. Default true.")] = True


class WatchdogSettings(_SettingsTable):
    """``[[watchdogs]]``: a hook that sees each call before it runs and can only restrict it."""

    use: Annotated[
        Literal["exfiltration", "secrets", "repeats"] | None,
        Field(
            description=(
                "Built-in watchdog to configure: exfiltration, secrets or repeats. All three are on by "
                "default. Either use or command is required."
            )
        ),
    ] = None
    action: Annotated[
        Literal["ask", "deny", "off"],
        Field(
            description=(
                "Decision of a built-in watchdog for a call that it detects: ask, deny, or off to disable "
                "the watchdog. Default ask."
            )
        ),
    ] = "ask"
    failures: Annotated[
        int,
        Field(
            gt=0,
            le=1000,
            description="Only for repeats: number of failures in a row of the same call. Default 5, from 1 to 1000.",
        ),
    ] = 5
    command: Annotated[
        tuple[str, ...] | None,
        Field(
            min_length=1,
            description="Program of your own and its arguments, as a watchdog. Either use or command is required.",
        ),
    ] = None
    timeout_ms: Annotated[
        int,
        Field(
            gt=0,
            le=_HOUR_MS,
            description=(
                "Maximum time for a decision of the command, in milliseconds; then the call is denied. "
                "Default 5000, from 1 to 3600000."
            ),
        ),
    ] = 5_000

    @model_validator(mode="after")
    def _check_choice(self) -> WatchdogSettings:
        if (self.use is None) == (self.command is None):
            raise ValueError("expected either use, with the name of a built-in watchdog, or command")
        given = self.model_fields_set
        if self.command is not None and (more := sorted(given & {"action", "failures"})):
            raise ValueError(
                f"{' and '.join(more)} are only for built-in watchdogs; a command returns its decision itself"
            )
        if "failures" in given and self.use != "repeats":
            raise ValueError("failures is only for use = 'repeats'")
        return self


class NetworkSettings(_SettingsTable):
    """``[network]``: the way of tools, programs and servers to hosts outside: a proxy, and trusted authorities."""

    proxy: Annotated[
        str | PrefixedSecretReference,
        Field(
            description=(
                "HTTP proxy through which Handrail reaches hosts: http://HOST:PORT, a secret with such an address, or "
                "'environment' for the variables HTTPS_PROXY, HTTP_PROXY and NO_PROXY. Default none."
            )
        ),
    ] = ""
    no_proxy: Annotated[
        tuple[str, ...],
        Field(
            description=(
                "Hosts that are reached without the proxy, as in NO_PROXY: a name with its subdomains, an address, a network, "
                "or '*'. This machine never needs the proxy. Default none."
            )
        ),
    ] = ()
    ca_file: Annotated[
        str,
        Field(description=("File with further certificate authorities in PEM format. Default: those of the system.")),
    ] = ""


class McpSettings(NetworkSettings):
    """``[mcp]``: upstream MCP servers, and access to Handrail's own MCP server.

    ``proxy``, ``no_proxy`` and ``ca_file`` are those of ``[network]``, unless one of them is set here for servers with a URL.
    """

    files: Annotated[
        tuple[str, ...],
        Field(
            description=(
                "Paths of files with an mcpServers object, as other programs write them. Set the permissions "
                "of their servers under servers, by the same name. Default none."
            )
        ),
    ] = ()
    servers: Annotated[
        dict[Annotated[str, Field(pattern=SERVER_NAME)], UpstreamServerSettings],
        Field(description="Upstream servers, by name: [mcp.servers.NAME] with command or url, and permissions."),
    ] = {}
    serve: Annotated[
        McpServeSettings,
        Field(
            description=(
                "Access to handrail mcp --http, by tokens or an authorization server. Command-line options override it."
            )
        ),
    ] = McpServeSettings()


class SecretReference(_SettingsTable):
    """The location of a secret's value: exactly one of these."""

    env: Annotated[str | None, Field(description="Environment variable with the value.")] = None
    file: Annotated[str | None, Field(description="File with the value, absolute or with ~, of mode 0600.")] = None
    command: Annotated[
        tuple[str, ...] | None, Field(description="Program that prints the value, and its arguments.")
    ] = None


class Settings(_SettingsTable):
    """All settings of a Handrail configuration."""

    agent: Annotated[
        str,
        Field(
            pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$",
            description=(
                "Agent of sessions that name none: a folder agents/NAME next to the configuration file. "
                "Default default."
            ),
        ),
    ] = "default"
    mode: Annotated[
        Mode,
        Field(
            description=(
                "Mode, a set of rules that decides which calls run without approval: plan (read only), ask, "
                "accept-edits or auto; handrail modes lists the rules. An untrusted workspace file can only "
                "set a stricter mode. Default ask."
            )
        ),
    ] = DEFAULT_MODE
    rules: Annotated[
        tuple[RuleInput, ...],
        Field(
            description=(
                "Permission rules, as 'ACTION PERMISSION [PATTERN]', or as tables with examples that are "
                "checked. '@NAME' selects a shipped rule set, as in '@developer'; 'handrail rules' lists them. The rules "
                "of all layers apply together. Default none."
            )
        ),
    ] = ()
    ceiling: Annotated[
        Requires | None,
        Field(
            description=(
                "Permission limit that no agent on this machine may exceed. Default: the declarations of its tools."
            )
        ),
    ] = None
    secrets: Annotated[
        dict[str, SecretReference],
        Field(
            description=(
                "Secrets that tools may receive, by name, each with the location of its value; never write "
                "the value itself here. Not allowed in a workspace file."
            )
        ),
    ] = {}
    tools: Annotated[
        dict[str, ToolSettings],
        Field(
            description=(
                "Settings of single tools, by tool ID: enabled (whether agents have the tool), config "
                "(values of the tool's own settings), timeout_ms (timeout in milliseconds), max_output "
                "(bytes of output for a model) and max_entries (entries of a list for a model). For "
                "web_search and web_fetch also answered_by (the tool that answers). A stronger layer "
                "overrides each setting of each tool separately. Not allowed in a workspace file."
            )
        ),
    ] = {}
    language_servers: Annotated[
        dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_+#-]{0,30}$")], LanguageServerSettings],
        Field(
            description=(
                "Language servers for lsp, by language: command, files, folders and enabled. python, typescript, c and go need no "
                "setting if their server is installed. Not allowed in a workspace file."
            )
        ),
    ] = {}
    limits: Annotated[LimitSettings, Field(description="Limits of every call.")] = LimitSettings()
    approvals: Annotated[ApprovalSettings, Field(description="Validity of approval requests and approvals.")] = (
        ApprovalSettings()
    )
    sandbox: Annotated[
        SandboxSettings,
        Field(
            description=(
                "Resource limits for the programs of a call, and exceptions from their confinement. Not "
                "allowed in a workspace file."
            )
        ),
    ] = SandboxSettings()
    env: Annotated[
        EnvironmentSettings,
        Field(description="Variables of your environment that programs get. Not allowed in a workspace file."),
    ] = EnvironmentSettings()
    state: Annotated[StateSettings, Field(description="Database of the state. Not allowed in a workspace file.")] = (
        StateSettings()
    )
    undo: Annotated[
        UndoSettings, Field(description="Copies of files for `handrail undo`. Not allowed in a workspace file.")
    ] = UndoSettings()
    catalog: Annotated[CatalogSettings, Field(description="Tools and texts that a model gets.")] = CatalogSettings()
    search: Annotated[
        SearchSettings, Field(description="Semantic search for tools. Not allowed in a workspace file.")
    ] = SearchSettings()
    network: Annotated[
        NetworkSettings,
        Field(
            description=(
                "Network route to other hosts, for tools, the programs in sandboxes, and servers. Not allowed in a workspace file, which could redirect it through another host."
            )
        ),
    ] = NetworkSettings()
    mcp: Annotated[
        McpSettings,
        Field(
            description=(
                "Upstream MCP servers, whose tools obey the same rules, and access to Handrail's own MCP "
                "server. Not allowed in a workspace file, which could start programs with your secrets."
            )
        ),
    ] = McpSettings()
    watchdogs: Annotated[
        tuple[WatchdogSettings, ...],
        Field(
            description=(
                "Hooks that see each call before it runs and can only restrict it: three built-in ones, and "
                "commands of your own. Not allowed in a workspace file, since commands run without a sandbox."
            )
        ),
    ] = ()


LIST_KEYS = ("rules", "watchdogs")
"""Keys of lists whose items are merged over all layers."""


OPERATOR_ONLY = {
    "language_servers": "cannot name language servers, since its author would choose which programs start",
    "watchdogs": "cannot name watchdogs, since they run outside the sandbox",
    "secrets": "cannot name secrets, since its author would choose which of your files and programs are read",
    "tools": "cannot set up tools, since its author would choose which of your secrets they get",
    "search": "cannot set up search, since its author would choose where texts of tools and requests are sent",
    "mcp": "cannot name MCP servers, since its author would choose which programs start with which of your secrets",
    "network": "cannot set up the network route, since its author would choose who sees the traffic",
    "state": "cannot set up the state, since its author would choose what stores the log",
    "env": "cannot pass variables, since its author would choose which of your variables their own programs read",
    "undo": "cannot change undo, since its author would choose which changes cannot be undone",
    "sandbox": "cannot change the sandbox, since its author would choose the confinement of their own programs",
}
"""Keys that a workspace file cannot have, trusted or not, with the reasons."""


def get_setting_table_models() -> dict[str, type[BaseModel]]:
    """Return the keys that are tables of settings, each of which is overridden separately."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in Settings.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, _SettingsTable):
            found[name] = field.annotation
    return found


def split_setting_key(key: str) -> tuple[str, ...]:
    """Return the parts of a setting's key: ``tools."mail.send".timeout_ms`` has three.

    :raises ValueError: if it is not a TOML key
    """
    if '"' not in key and "'" not in key:
        return tuple(key.split("."))
    node: Any = tomllib.loads(f"{key} = 0")
    parts: list[str] = []
    while isinstance(node, dict):
        ((part, node),) = cast("dict[str, Any]", node).items()
        parts.append(part)
    return tuple(parts)


def join_setting_key(path: Iterable[str]) -> str:
    """Return the key for its parts, the inverse of :func:`split_setting_key`."""
    return ".".join(part if _BARE.fullmatch(part) else json.dumps(part, ensure_ascii=False) for part in path)


def list_setting_keys() -> Iterator[str]:
    """Yield every setting as ``key`` or ``table.key``, in the order of the models."""
    inner = get_setting_table_models()
    for name in Settings.model_fields:
        if name in inner:
            yield from (f"{name}.{key}" for key in inner[name].model_fields)
        else:
            yield name
