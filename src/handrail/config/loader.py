"""The configuration of one workspace, or of none: all layers read and merged."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from handrail.config.layers import (
    ConfigLayer,
    LayerKind,
    LayerValue,
    build_environment_layer,
    build_flags_layer,
    merge_layers,
    separate_invalid_servers,
)
from handrail.config.operator_settings import FILE_NAME, OPERATOR_ONLY, Settings, split_setting_key
from handrail.config.toml_file import parse_config_file, read_config_file_bytes
from handrail.contract.errors import Diagnostic, LoadError
from handrail.contract.permission_modes import Mode
from handrail.contract.rule_forms import RuleWithExamples, extract_rule_line, to_rule_with_examples
from handrail.contract.struct import Struct, field
from handrail.contract.tool.operator_tool_settings import ToolSettings, ToolSettingsLayer
from handrail.contract.tool.tool_ids_and_wire_names import nearest_names
from handrail.origins.program_lookup import locate_user_folder
from handrail.policy.rules.rule_sets import PREFIX
from handrail.policy.rules.rules_and_modes import ACTIONS

if TYPE_CHECKING:
    from handrail.store.state_folders import StateFolders


# The workspace's own ``handrail.toml``: read safely, and limited to ``deny`` and ``ask`` rules until the user trusts it.

UNTRUSTED_REASON = "the user does not trust its content; review it with handrail trust"
NARROWING_ACTIONS = ("deny", "ask")
"""The actions of rules that apply without trust in their author."""


class WorkspaceFile(Struct, frozen=True):
    """The workspace file, as it was read once.

    :param sha256: the hash of ``content`` in hexadecimal, which the user trusts
    :param trusted: whether the user has trusted exactly this content
    """

    path: Path
    content: bytes
    sha256: str
    trusted: bool


def read_workspace_file(workspace: Path, trusted: str | None) -> WorkspaceFile | None:
    """Return the workspace file, or None if there is none.

    :param workspace: canonical
    :param trusted: the hash that the user trusted last, if any
    :raises LoadError: unless it is a regular file with one name and an acceptable size
    """
    path = workspace / FILE_NAME
    content = read_config_file_bytes(path, follow_no_link=True)
    if content is None:
        return None
    digest = hashlib.sha256(content).hexdigest()
    return WorkspaceFile(path, content, digest, digest == trusted)


def parse_workspace_layer(file: WorkspaceFile) -> tuple[ConfigLayer, list[Diagnostic]]:
    """Return the layer of the workspace file, and the faults that only such a file can have.

    :raises LoadError: if it is not TOML
    """
    table, lines = parse_config_file(file.path, file.content)
    layer = build_file_layer("workspace", file.path, table, lines)
    if not file.trusted:
        layer = ConfigLayer(layer.kind, layer.table, layer.locate, _find_inactive_reason)
    faults: list[Diagnostic] = []
    for key, reason in OPERATOR_ONLY.items():
        if key in table:
            text = f"a workspace file {reason}; move [{key}] to the {FILE_NAME} of the configuration folder"
            faults.append(Diagnostic(layer.locate(key), key, text))
    rules: Any = table.get("rules")
    for number, text in enumerate(cast("list[Any]", rules) if isinstance(rules, list) else []):
        where = f"rules[{number}]"
        if not isinstance(text, (str, dict)):
            continue  # reported as a fault of the value
        written = extract_rule_line(cast("object", text))
        if (action := extract_first_rule_word(written)).startswith(PREFIX):
            continue  # a rule set, whose name the policy checks
        if action not in ACTIONS:
            near = nearest_names(action.lower(), ACTIONS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            faults.append(
                Diagnostic(
                    layer.locate(where),
                    where,
                    f"{written!r} does not begin with an action; a rule begins with allow, ask or deny{hint}",
                )
            )
    return layer, faults


def build_file_layer(kind: LayerKind, path: Path, table: Mapping[str, Any], lines: Mapping[str, int]) -> ConfigLayer:
    """Return the layer of one file, with lines as places."""

    def place(where: str) -> str:
        # The line of the value, or of the table or array that has it.
        if f"{where}[0]" in lines:  # an array of tables has no line itself
            where = f"{where}[0]"
        while where and where not in lines:
            where = where[: max(where.rfind("."), where.rfind("["), 0)]
        return f"{path}:{lines[where]}" if where in lines else str(path)

    return ConfigLayer(kind, table, place)


def extract_first_rule_word(rule: str) -> str:
    """Return the first word of a rule, which alone decides whether an untrusted rule applies."""
    return (rule.strip(" \t").split(None, 1) or [""])[0]


def _find_inactive_reason(key: str, value: Any) -> str:
    return (
        ""
        if key == "rules" and extract_first_rule_word(extract_rule_line(value)) in NARROWING_ACTIONS
        else UNTRUSTED_REASON
    )


_T = TypeVar("_T")


class ConfiguredRule(Struct, frozen=True):
    """A rule of a layer, in force or not.

    :param scope: project for rules of files; session for those of variables and flags, which belong to one process
    :param source: the place of the rule
    :param is_narrowing: whether the file is untrusted, so that an ask must not override a deny
    """

    text: str
    scope: Literal["project", "session"]
    source: str
    is_narrowing: bool = False
    match: tuple[Any, ...] = ()
    not_match: tuple[Any, ...] = ()

    @property
    def entry(self) -> RuleWithExamples:
        """The rule with its examples."""
        return RuleWithExamples(rule=self.text, match=self.match, not_match=self.not_match)


class MergedConfiguration(Struct, frozen=True):
    """The settings with their origins. ``folder`` has ``tools/`` and ``agents/<name>/tools/``.

    :param settings: the settings in force
    :param file: the configuration file, or None if there is none
    :param values: the values of all layers, also those without effect
    :param workspace: the workspace file; None if there is none or it was not requested
    :param workspace_folder: the folder where a model can write; None if no workspace was requested
    :param unsound_servers: the faults of the MCP servers that are not valid, by name; ``settings`` does not have them
    """

    settings: Settings
    folder: Path
    file: Path | None
    values: tuple[LayerValue, ...] = ()
    workspace: WorkspaceFile | None = None
    unsound_servers: Mapping[str, tuple[Diagnostic, ...]] = field(default_factory=dict[str, tuple[Diagnostic, ...]])
    workspace_folder: Path | None = None

    def list_tool_folders(self, agent: str) -> tuple[tuple[str, Path], ...]:
        """Return ``(name, folder)`` of the global and the agent's tool folder, in loading order."""
        return (("global", self.folder / "tools"), ("agent", self.folder / "agents" / agent / "tools"))

    @property
    def tool_setting_layers(self) -> tuple[ToolSettingsLayer, ...]:
        """The settings of tools, each as a layer with its place."""
        found: list[ToolSettingsLayer] = []
        for value in self.values:
            path = split_setting_key(value.key)
            if path[0] == "tools" and len(path) > 2 and not value.inactive_reason:
                _, tool, name, *key = path
                one = {"config": {key[0]: value.value}} if key else {name: value.value}
                found.append(ToolSettingsLayer(str(value.origin), {tool: ToolSettings.model_validate(one)}))
        return tuple(found)

    @property
    def rules(self) -> tuple[ConfiguredRule, ...]:
        """The rules in force, in the order of the layers."""
        return tuple(_build_rule(value, self.workspace) for value in self._rules(in_force=True))

    @property
    def process_wide_mode(self) -> Mode | None:
        """The mode of a variable or flag, which applies to every agent of this process; None without one."""
        held = [value for value in self.values if value.key == "mode" and not value.inactive_reason]
        return self.settings.mode if any(v.origin.kind in ("environment", "flag") for v in held) else None

    @property
    def project_rules(self) -> tuple[ConfiguredRule, ...]:
        """The rules of files, which apply to every process in the workspace."""
        return tuple(rule for rule in self.rules if rule.scope == "project")

    @property
    def process_wide_rules(self) -> tuple[ConfiguredRule, ...]:
        """The rules of variables and flags, which apply to the sessions of this process only."""
        return tuple(rule for rule in self.rules if rule.scope == "session")

    @property
    def client_registration_rules(self) -> tuple[ConfiguredRule, ...]:
        """The rules that a client process registers: all but those of the workspace file."""
        found = (value for value in self._rules(in_force=True) if value.origin.kind != "workspace")
        return tuple(_build_rule(value, self.workspace) for value in found)

    @property
    def inactive_rules(self) -> tuple[ConfiguredRule, ...]:
        """The rules that are not in force, which are checked too."""
        return tuple(_build_rule(value, self.workspace) for value in self._rules(in_force=False))

    def _rules(self, *, in_force: bool) -> Iterator[LayerValue]:
        for value in self.values:
            if value.key == "rules" and value.origin.kind != "default" and in_force is not bool(value.inactive_reason):
                yield value

    @property
    def untrusted_workspace_values(self) -> tuple[LayerValue, ...]:
        """The values of the workspace file that need the user's trust."""
        return tuple(value for value in self.values if value.inactive_reason == UNTRUSTED_REASON)

    @property
    def untrusted_workspace_warning(self) -> str | None:
        """A warning for the user that parts of the workspace file have no effect; None if all have."""
        held = self.untrusted_workspace_values
        if self.workspace is None or not held:
            return None
        allows = sum(value.key == "rules" for value in held)
        others = sorted({value.key for value in held if value.key != "rules"})
        parts = [f"{allows} allow rule{'s' if allows != 1 else ''}"] if allows else []
        parts += others
        return (
            f"{self.workspace.path} is not trusted, so these settings have no effect: {', '.join(parts)}. "
            "To review them, run: handrail trust"
        )


def default_config_folder() -> Path:
    """Return the platform's configuration folder; one that does not exist if the user has no home folder."""
    import platformdirs

    found = locate_user_folder(lambda: platformdirs.user_config_dir("handrail", appauthor=False), ".config/handrail")
    if found is None or _leads_through_file(found):  # services have HOME=/dev/null
        found = "/nonexistent/handrail"
    return Path(found)


def _leads_through_file(path: str) -> bool:
    try:
        os.stat(path)  # noqa: PTH116 - the error tells
    except NotADirectoryError:
        return True
    except OSError:
        pass
    return False


def load_configuration(
    file: str | Path | None,
    *,
    folders: StateFolders | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Iterable[str] = (),
) -> MergedConfiguration:
    """Read and check the configuration.

    :param file: the file, which must exist; None for the default one, which may be missing
    :param folders: the folders of the workspace whose own file applies too; None for no workspace
    :param environment: the variables; None for those of this process
    :param flags: ``KEY=VALUE`` texts, which override all else
    :raises LoadError: with every fault of every layer
    :raises UsageError: for a flag that is not ``KEY=VALUE``
    """
    faults: list[Diagnostic] = []
    # Without "..", so that no link on the way, which may lead through the workspace, changes the opened file.
    path = Path(os.path.abspath(file if file is not None else default_config_folder() / FILE_NAME))  # noqa: PTH100
    layers: list[ConfigLayer] = []
    content = _collect_faults(faults, lambda: read_config_file_bytes(path))
    if content is not None and (read := _collect_faults(faults, lambda: parse_config_file(path, content))) is not None:
        layers.append(build_file_layer("configuration", path, *read))
    elif content is None and file is not None and not faults:
        faults.append(
            Diagnostic(str(path), "", "cannot be read: the file does not exist; handrail init --global creates one")
        )
    own = None if folders is None else _collect_faults(faults, lambda: _find_workspace_file(folders))
    for layer, problems in (
        *_load_workspace_layers(own, faults),
        build_environment_layer(os.environ if environment is None else environment),
        build_flags_layer(flags),
    ):
        layers.append(layer)
        faults += problems
    unsound: dict[str, tuple[Diagnostic, ...]] = {}
    for place, layer in enumerate(layers):
        layers[place], found = separate_invalid_servers(layer)
        unsound |= found
        faults += layers[place].find_faults()
    if faults:
        raise LoadError(faults)
    settings, values = merge_layers(layers)
    folder = None if folders is None else folders.workspace
    return MergedConfiguration(
        settings, path.parent, path if content is not None else None, values, own, unsound, folder
    )


def check_outside_workspace(settings: MergedConfiguration, workspace: Path) -> None:
    """Check that the configuration file is outside the workspace, where no call can write.

    :raises LoadError: if it is in the workspace, by its name or behind a link
    """
    if settings.file is None:
        return
    for place in (settings.file.absolute(), settings.file.resolve()):
        if place.is_relative_to(workspace):
            problem = (
                f"is in the workspace {workspace}, where a model can write; move it to a folder outside the workspace"
            )
            if place == workspace / FILE_NAME:
                problem += f". Handrail reads a workspace's own {FILE_NAME} without this setting"
            raise LoadError([Diagnostic(str(settings.file), "", problem)])


def _load_workspace_layers(
    workspace_file: WorkspaceFile | None, faults: list[Diagnostic]
) -> list[tuple[ConfigLayer, list[Diagnostic]]]:
    """Return the layer of the workspace file, if it exists and can be read."""
    layer = None if workspace_file is None else _collect_faults(faults, lambda: parse_workspace_layer(workspace_file))
    return [] if layer is None else [layer]


def _find_workspace_file(folders: StateFolders) -> WorkspaceFile | None:
    from handrail.store import operator_decisions

    record = operator_decisions.read_workspace_trust(folders)
    return read_workspace_file(folders.workspace, record.sha256 if record is not None else None)


def _collect_faults(faults: list[Diagnostic], work: Callable[[], _T]) -> _T | None:
    """Return the result of ``work``, or None after adding its faults."""
    try:
        return work()
    except LoadError as error:
        faults += error.diagnostics
        return None


def _build_rule(value: LayerValue, workspace_file: WorkspaceFile | None) -> ConfiguredRule:
    of_file = value.origin.kind in ("configuration", "workspace")
    untrusted = value.origin.kind == "workspace" and not (workspace_file is not None and workspace_file.trusted)
    entry = to_rule_with_examples(value.value)
    scope: Literal["project", "session"] = "project" if of_file else "session"
    return ConfiguredRule(entry.rule, scope, value.origin.place, untrusted, entry.match, entry.not_match)
