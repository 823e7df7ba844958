"""The name of the file that no tool writes, in every spelling that a file system may take for it."""

from __future__ import annotations

import pytest

from handrail.contract.protected import protected

pytestmark = pytest.mark.proves("P-15a")


@pytest.mark.parametrize(
    "name",
    [
        *("handrail.toml", "HANDRAIL.TOML", "Handrail.Toml", "handrail.toml.", "handrail.toml .", "handrail.toml "),
        *("handrail.toml::$DATA", "hand\u200crail.toml", "handrail.toml\u200b", "ｈandrail.toml", "handrail\uff0etoml"),
    ],
)
def test_every_spelling_is_the_file(name: str) -> None:
    assert protected(name)


@pytest.mark.parametrize(
    "name",
    ["handrail.tom", "handrail.toml.bak", "my-handrail.toml", "src/handrail.toml", ".", "handrail", "handráil.toml2"],
)
def test_another_name_or_folder_is_not(name: str) -> None:
    assert not protected(name)
