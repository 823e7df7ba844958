"""Named secrets, and their access control: a tool gets the secrets that it declared, by name, and no others.

A tool in this process gets a value through :class:`ToolSecretService`, an executable by an inherited descriptor
(``SandboxProfile.secrets``), never by arguments or environment. Programs that the shell service starts get none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from handrail.contract.errors import ToolError
from handrail.contract.text.lazy_patterns import compile_regex_lazily
from handrail.contract.tool.operator_tool_settings import format_tool_setting_line
from handrail.contract.tool.spec import ToolSpec

SECRET_NAME = compile_regex_lazily(r"[\w./:-]+")
"""The pattern of a secret's name. A name is not confidential."""
_NO_VALUES: Mapping[str, str] = MappingProxyType({})
_NO_SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType({})


def explain_invalid_secret_name(name: object) -> str | None:
    """Return why a name is not valid for a secret; None if it is."""
    if isinstance(name, str) and SECRET_NAME.fullmatch(name):
        return None
    return f"{name!r} is not a valid name for a secret. Use letters, digits and any of . _ - / :"


class SecretStore:
    """The known secrets by name, and why configured ones are missing.

    :param values: name to value
    :param missing: name to the reason why its value is not available
    :param settings: by tool id: which setting of the tool is which secret
    """

    __slots__ = ("_missing", "_settings", "_values")

    def __init__(
        self,
        values: Mapping[str, str] = _NO_VALUES,
        missing: Mapping[str, str] = _NO_VALUES,
        settings: Mapping[str, Mapping[str, str]] = _NO_SETTINGS,
    ) -> None:
        self._values = dict(values)
        self._missing = dict(missing)
        self._settings = settings

    def __repr__(self) -> str:
        return f"<secrets {', '.join(sorted(self._values)) or 'none'}>"  # never a value

    @property
    def names(self) -> frozenset[str]:
        """The names of the known secrets."""
        return frozenset(self._values)

    def with_added_secrets(self, values: Mapping[str, str]) -> SecretStore:
        """Return a store with these secrets added; they replace secrets of the same name."""
        return SecretStore({**self._values, **values}, self._missing, self._settings) if values else self

    def with_secret_settings(self, settings: Mapping[str, Mapping[str, str]]) -> SecretStore:
        """Return a store with the same secrets and other secret settings of tools."""
        return SecretStore(self._values, self._missing, settings)

    def with_missing_secret(self, name: str, why: str) -> SecretStore:
        values = {other: value for other, value in self._values.items() if other != name}
        return SecretStore(values, {**self._missing, name: why}, self._settings)

    def restrict_to(self, names: Iterable[str], why: str) -> SecretStore:
        """Return a store of ``names`` only; all others are missing for this reason."""
        kept = self.select(names)
        missing = {name: why for name in self._values if name not in kept}
        return SecretStore(kept, {**self._missing, **missing}, self._settings)

    def select(self, names: Iterable[str]) -> dict[str, str]:
        """Return the known secrets among ``names``."""
        return {name: self._values[name] for name in names if name in self._values}

    def get_secret_values_for_tool(self, spec: ToolSpec) -> dict[str, str]:
        """Return the secrets that a tool declares, by name, and its secret settings, by key."""
        found = {name: self._values[name] for name in spec.secrets if name in self._values}
        own = self._settings.get(spec.id, _NO_VALUES)
        found |= {key: self._values[own[key]] for key in list_secret_setting_keys(spec) if own.get(key) in self._values}
        return found

    def explain_unset_secret_setting(self, spec: ToolSpec, key: str) -> str | None:
        """Return why a secret setting of a tool is not available, with the remedy; None if it is."""
        if (name := self._settings.get(spec.id, _NO_VALUES).get(key)) is not None:
            return self.explain_missing_secret(name)
        return f"{key} (not set; add {format_tool_setting_line(spec.id, key, secret=True)})"

    def explain_missing_secret(self, name: str) -> str | None:
        """Return why ``name`` is not available, with the remedy for the operator; None if it is."""
        if name in self._values:
            return None
        remedy = f'add {name} = {{ env = "…" }} (or file, or command) under [secrets] of handrail.toml, or pass it to open_kernel'
        if (why := self._missing.get(name)) is not None:
            return f"{name} ({why})"
        return f"{name} (not set; {remedy})"


NO_SECRETS = SecretStore()


def list_secret_setting_keys(spec: ToolSpec) -> tuple[str, ...]:
    """Return the keys of a tool's secret settings."""
    return tuple(key for key, setting in spec.config.items() if setting.secret)


class ToolSecretService:
    """A secrets service for one tool: :class:`~handrail.contract.services.tool_runtime.SecretService`.

    :param refusal: why this call gets no secrets, whatever its tool declared
    """

    __slots__ = ("_refusal", "_spec", "_store")

    def __init__(self, spec: ToolSpec, store: SecretStore, refusal: str | None = None) -> None:
        self._spec = spec
        self._store = store
        self._refusal = refusal

    def __repr__(self) -> str:
        names = (*self._spec.secrets, *list_secret_setting_keys(self._spec))
        return f"<secrets of {self._spec.id}: {', '.join(names) or 'none'}>"

    def get(self, name: str) -> str:
        tool = self._spec.id
        is_setting = name not in self._spec.secrets and name in list_secret_setting_keys(self._spec)
        if name not in self._spec.secrets and not is_setting:
            raise ToolError(
                f"Tool `{tool}` did not declare the secret {name!r}, so it cannot read it. The author of the tool "
                f"can add it: secrets=[{name!r}].",
                kind="denied",
            )
        if self._refusal is not None:
            raise ToolError(
                f"Tool `{tool}` cannot use secrets in this call: {self._refusal}. Use another tool.", kind="denied"
            )
        store = self._store
        why = store.explain_unset_secret_setting(self._spec, name) if is_setting else store.explain_missing_secret(name)
        if why is not None:
            raise ToolError(
                f"Tool `{tool}` needs a secret that is not available: {why}. Ask the user to set it.",
                kind="unavailable",
            )
        return store.get_secret_values_for_tool(self._spec)[name]


# Variables of the operator's environment that the operator passes to programs.

_logger = logging.getLogger("handrail.runtime")


def read_passthrough_variables(names: Iterable[str], redact: Callable[[str], str]) -> dict[str, str]:
    """Return the named variables of this process. One with a registered secret in its value is left out, with a warning.

    :param redact: returns the same object for a text without a registered secret
    """
    found: dict[str, str] = {}
    for name in names:
        if (value := os.environ.get(name)) is None or "\0" in value:
            continue
        if redact(value) is not value:
            _logger.warning("programs do not get the variable %s of [env] pass: its value contains a secret", name)
            continue
        found[name] = value
    return found
