"""Fixtures for all tests: no configuration, state or identity of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from shutil import copy

import pytest
from hypothesis import HealthCheck, settings
from tests.loading import pytest_collection as pytest_collection
from tests.loading import pytest_collection_finish as pytest_collection_finish
from tests.scheduling import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler

from handrail.sandbox.start import sandboxed_process

# What holds for every value is tried on few of them each time, others every time, and on many by `make soak`.
settings.register_profile("handrail", deadline=None, max_examples=35, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("handrail"), max_examples=500)
settings.load_profile("handrail")

# A busy machine takes long over the namespaces of what has ended, and tests count what is left.
sandboxed_process.DISMANTLING_S = 300.0

_IDENTITY = {
    "GIT_AUTHOR_NAME": "Test",
    "GIT_AUTHOR_EMAIL": "test@example.invalid",
    "GIT_COMMITTER_NAME": "Test",
    "GIT_COMMITTER_EMAIL": "test@example.invalid",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


@pytest.fixture(scope="session", autouse=True)
def a_machine_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Isolate a test: temporary configuration and state, a git identity, no certificates, colours or shell variables."""
    place = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("HANDRAIL_") or name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "FORCE_COLOR"):
                patch.delenv(name)
        patch.setenv("HANDRAIL_STATE", str(place / "state"))
        patch.setenv("XDG_CONFIG_HOME", str(place / "config"))
        patch.setenv("XDG_STATE_HOME", str(place / "xdg-state"))
        patch.setenv("NO_COLOR", "1")
        for name in ("COLUMNS", "LINES"):  # set by shells and test runners: they would break lines
            patch.delenv(name, raising=False)
        patch.setenv(
            "PYTHONDONTWRITEBYTECODE", "1"
        )  # what a test starts leaves nothing where tests look for what is left
        # No public authority is asked for anything here, and to load all of them takes longer than most tests.
        # It lies apart from this checkout, which some tests open: nothing in a workspace is believed about other machines.
        authority = copy(Path(__file__).with_name("authority.pem"), place)
        patch.setenv("SSL_CERT_FILE", str(authority))
        for name, value in _IDENTITY.items():
            patch.setenv(name, value)
        yield
