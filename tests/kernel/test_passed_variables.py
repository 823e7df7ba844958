"""Variables of the operator's environment are passed to programs by name, without secrets."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.kernel.test_agents import confined

from handrail import LoadError
from handrail.testing.scripted_kernel import temporary_kernel

SHOW = {"command": "printenv NODE_OPTIONS UNLISTED HELD"}


@confined
@pytest.mark.proves("S-01")
async def test_the_programs_of_bash_get_the_variables_that_the_operator_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("NODE_OPTIONS", "--trace"), ("UNLISTED", "no"), ("HELD", "a-registered-secret-value")):
        monkeypatch.setenv(name, value)
    settings = '[env]\npass = ["NODE_OPTIONS", "HELD", "NOT_SET"]\n'
    secrets = {"HELD": "a-registered-secret-value"}
    async with temporary_kernel(tmp_path, rules=["allow bash"], settings=settings, secrets=secrets) as kernel:
        answer = await (await kernel.session()).call("bash", SHOW)
    assert answer.data["output"] == "--trace\n", answer
    assert "HELD" in caplog.text and "a-registered-secret-value" not in caplog.text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("PATH", "is set by the sandbox"),
        ("LD_PRELOAD", "is set by the sandbox"),
        ("https_proxy", "is set by the sandbox"),
        ("BASH_ENV", "is set by the sandbox"),
        ("GITHUB_TOKEN", "looks like a secret"),
        ("OPENAI_API_KEY", "looks like a secret"),
        ("AWS_SECRET_ACCESS_KEY", "looks like a secret"),
        ("A-B", "is not the name of a variable"),
        ("", "is not the name of a variable"),
    ],
)
async def test_an_invalid_variable_name_stops_the_start_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(LoadError, match=reason):
        async with temporary_kernel(tmp_path, settings=f'[env]\npass = ["{name}"]\n'):
            pass


async def test_a_workspace_file_cannot_pass_variables(tmp_path: Path) -> None:
    (tmp_path / "ws").mkdir()
    (tmp_path / "ws" / "handrail.toml").write_text('[env]\npass = ["NODE_OPTIONS"]\n')
    with pytest.raises(LoadError, match="cannot pass variables"):
        async with temporary_kernel(tmp_path):
            pass
