"""``[secrets]``: references to values, and the reason if a value is unavailable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.config.places import Layers

from handrail.config.operator_settings import SecretReference
from handrail.config.secret_references import resolve_secrets
from handrail.runtime.secret_store import SecretStore

pytestmark = pytest.mark.proves("S-06")
VALUE = "hunter2-value"


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (f'"{VALUE}"', "is a value"),
        ("31337313373133", "is a value"),
        (f'["{VALUE}"]', "is not a reference"),
        (f'{{ value = "{VALUE}" }}', "unknown key 'value'"),
        ("{}", "has no key"),
        (f'{{ env = "A", file = "/{VALUE}" }}', "has env and file"),
        ('{ env = "" }', "not empty"),
        (f'{{ env = "A={VALUE}" }}', "name of an environment variable"),
        (f'{{ file = "{VALUE}" }}', "absolute path"),
        (f'{{ command = "echo {VALUE}" }}', "list of strings"),
        ("{ command = [] }", "list of strings"),
    ],
)
def test_a_secret_entry_that_is_not_a_reference_is_refused_without_its_value(
    layers: Layers, entry: str, why: str
) -> None:
    layers.config.write_text(f"[secrets]\nTOKEN = {entry}\n")
    (fault,) = layers.faults()
    assert why in fault and f"{layers.config}:2" in fault and "TOKEN" in fault
    assert "hunter2" not in fault and "31337" not in fault
    (fault,) = layers.faults({"HANDRAIL_SECRETS": f"{{TOKEN = {entry}}}"})[1:]
    assert "hunter2" not in fault


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            f'[tools."mail.send".config]\npassword = {{ secret = "A", value = "{VALUE}" }}\n',
            "neither text nor a reference to a secret",
        ),
        ("[tools.mail.config]\npassword = { secret = 31337 }\n", "neither text nor a reference to a secret"),
        ("[tools.mail.config]\npassword = 31337\n", "is not text; write the value of a setting in quotes"),
        (f'[tools."mail.send"]\npassword = "{VALUE}"\n', "unknown key; available: enabled"),
        (f'[tools.mail.send.config]\npassword = {{ secret = "{VALUE}" }}\n', "in quotes"),
        (f'tools = "{VALUE}"\n', "not a table"),
    ],
)
def test_an_invalid_tool_config_value_is_refused_without_its_value_in_the_error(
    layers: Layers, text: str, why: str
) -> None:
    layers.config.write_text(text)
    (fault,) = layers.faults()
    assert why in fault and f"{layers.config}:" in fault
    assert "hunter2" not in fault and "31337" not in fault


def test_a_workspace_file_cannot_set_up_tools(layers: Layers) -> None:
    layers.own.write_text('[tools.mail.config]\npassword = { secret = "TOKEN" }\n')
    assert any("cannot set up tools" in fault for fault in layers.faults())


def test_a_workspace_file_cannot_name_secrets(layers: Layers) -> None:
    layers.own.write_text('[secrets]\nTOKEN = { file = "/etc/shadow" }\n')
    assert any("cannot name secrets" in fault for fault in layers.faults())


async def one(reference: SecretReference, environment: dict[str, str] | None = None) -> tuple[str | None, str]:
    store = await resolve_secrets({"T": reference}, environment or {})
    assert isinstance(store, SecretStore) and VALUE not in repr(store)
    return store.select(["T"]).get("T"), store.explain_missing_secret("T") or ""


async def test_a_secret_is_read_from_a_variable_or_a_file_or_a_program(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{VALUE}\n")
    file.chmod(0o600)
    assert await one(SecretReference(env="V"), {"V": VALUE}) == (VALUE, "")
    assert await one(SecretReference(file=str(file))) == (VALUE, "")
    assert await one(SecretReference(command=("printf", "%s\\n", VALUE))) == (VALUE, "")


async def test_an_unavailable_secret_is_reported_with_the_reason_and_remedy(tmp_path: Path) -> None:
    loose, link, folder, large, odd = (tmp_path / name for name in ("loose", "link", "folder", "large", "odd"))
    loose.write_text(VALUE)
    loose.chmod(0o644)
    link.symlink_to(loose)
    folder.mkdir()
    large.write_bytes(b"x" * 70_000)
    odd.write_bytes(b"\xff\xfe\xff\xff")
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (large, odd):
        path.chmod(0o600)
    cases = [
        (SecretReference(env="V"), "V is not set"),
        (SecretReference(file=str(loose)), f"chmod 600 {loose}"),
        (SecretReference(file=str(link)), "must not be a link"),
        (SecretReference(file=str(folder)), "not a regular file"),
        (SecretReference(file=str(tmp_path / "fifo")), "not a regular file"),
        (SecretReference(file=str(tmp_path / "gone")), "No such file"),
        (SecretReference(file=str(large)), "limit is 64 KiB"),
        (SecretReference(file=str(odd)), "not UTF-8"),
        (SecretReference(command=("sh", "-c", f"echo {VALUE}; exit 3")), "exit code 3"),
        (SecretReference(command=("true",)), "is empty"),
        (SecretReference(command=(str(tmp_path / "gone"),)), "cannot be started"),
        (SecretReference(command=("yes",)), "limit is 64 KiB"),
    ]
    for reference, why in cases:
        value, reason = await one(reference)
        assert value is None and why in reason, (reference, reason)
        assert VALUE not in reason or "sh" in reason
    assert (await one(SecretReference(env="V"), {"V": ""}))[1].startswith("T (the variable V is empty")
