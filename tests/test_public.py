"""The public API: each facade loads its names on use, and users' code imports nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from tests.snippets import page, snippets

ROOT = Path(__file__).parent.parent
FACADES = ("handrail", "handrail.models", "handrail.policy", "handrail.sandbox", "handrail.sources", "handrail.testing")
PAGES = sorted(
    {"README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md") if "adr" not in path.parts)}
    - {"docs/architecture.md"}
)
"""The pages for users. Decisions and the architecture are for those who change Handrail."""


def exported(facade: str) -> list[str]:
    return import_module(facade).__all__


def beyond(text: str) -> Iterator[str]:
    """The imports of a program that are of Handrail and not public."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.startswith("handrail.") and one.name not in FACADES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "handrail":
            module = node.module or ""
            known = exported(module) if module in FACADES else ()
            yield from (f"{module}: {one.name}" for one in node.names if one.name not in known)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import handrail\nfrom handrail import tool\nfrom handrail.testing import PlaybackModel", []),
        ("import handrail.kernel.local_kernel", ["handrail.kernel.local_kernel"]),
        ("from handrail import kernel", ["handrail: kernel"]),
        (
            "def f():\n    from handrail.contract.calls_and_results import CallAnswer",
            ["handrail.contract.calls_and_results: CallAnswer"],
        ),
        ("from handrail.sandbox import tier_probe", ["handrail.sandbox: tier_probe"]),
    ],
)
def test_an_import_of_a_private_name_is_detected(text: str, found: list[str]) -> None:
    assert list(beyond(text)) == found


@pytest.mark.parametrize("name", PAGES)
def test_code_on_a_page_imports_only_exported_names(name: str) -> None:
    faults = [one for snippet in snippets(page(name), "python") for one in beyond(snippet.text)]
    assert not faults, f"{name} imports what is private: {', '.join(faults)}"


def test_the_demonstrations_import_only_public_names() -> None:
    faults = [
        f"{path.relative_to(ROOT)}: {one}"
        for path in sorted((ROOT / "demos").rglob("*.py"))
        for one in beyond(path.read_text(encoding="utf-8"))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("facade", FACADES)
def test_a_facade_has_all_its_exported_names_and_declares_the_rest_private(facade: str) -> None:
    module, names = import_module(facade), exported(facade)
    assert names == sorted(set(names)) == dir(module)
    for name in names:
        assert getattr(module, name) is not None
    assert "private by\nconvention" in (module.__doc__ or "") or "private by convention" in (module.__doc__ or "")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_importing_the_facades_loads_only_the_module_that_loads_names_lazily() -> None:
    code = f"import sys, {', '.join(FACADES)}\nprint(*(name for name in sys.modules if name.startswith('handrail')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {*FACADES, "handrail.contract"}
