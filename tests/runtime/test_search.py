"""The search service on real trees, with and without a sandbox."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handrail.contract.errors import ToolError
from handrail.contract.sandbox_protocol import ProgramSpec, Sandbox, SandboxProfile, SandboxTier
from handrail.contract.services.file_services import FileSearchResult
from handrail.contract.tool.requires import AccessCheck, Capability, CapabilityLayer, CapabilitySet
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots
from handrail.runtime.guard.guarded_sandbox import GuardedSandbox
from handrail.runtime.ripgrep import (
    HiddenFileRecord,
    RipgrepOutputParser,
    SearchPathFilter,
    expand_braces,
    make_ripgrep_exit_error,
)
from handrail.runtime.search_service import RipgrepSearch
from handrail.sandbox.tier_probe import RefusingSandbox, choose_sandbox

pytestmark = pytest.mark.proves("T-08")

Searching = Callable[..., RipgrepSearch]


def everything(_: Capability, __: str | Sequence[str]) -> str | None:
    return None


def nothing_like(*names: str) -> AccessCheck:
    def may(_: Capability, target: str | Sequence[str]) -> str | None:
        assert isinstance(target, str)
        return f"{target} is denied" if Path(target).name in names else None

    return may


@pytest.fixture(params=["confined", "direct"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    if request.param == "direct":
        return RefusingSandbox(SandboxTier("none", "not used in this test"))
    found = choose_sandbox()
    if not found.tier.is_confining:
        pytest.skip(found.tier.detail)
    return found


@pytest.fixture
def searching(workspace: Path, tmp_path: Path, sandbox: Sandbox) -> Searching:
    """Makes a search door on the workspace, with what may be read."""
    scratch = tmp_path.resolve() / "scratch"
    scratch.mkdir()

    def make(may: AccessCheck = everything, readable: Sequence[Path] = ()) -> RipgrepSearch:
        roots = SessionRoots(workspace, readable)
        whole = CapabilityLayer("test", fs_read=(str(workspace), *map(str, readable)))
        profile = SandboxProfile(roots.workspace, str(scratch), readable=roots.readable)
        return RipgrepSearch(roots, sandbox, profile, CapabilitySet((whole,)), may, HiddenFileRecord())

    return make


def put(workspace: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        path = workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def lines(found: FileSearchResult) -> list[tuple[str, int, str]]:
    return [(match.path, match.line, match.text) for match in found.matches]


async def test_matches_are_sorted_and_have_path_line_and_text(workspace: Path, searching: Searching) -> None:
    put(workspace, {"b.py": "x\ndef run():\n", "a/c.py": "def run():\r\n    run()\n", "d.txt": "nothing"})
    found = await searching().grep("run")
    assert lines(found) == [("a/c.py", 1, "def run():"), ("a/c.py", 2, "    run()"), ("b.py", 2, "def run():")]
    assert not found.is_truncated


class _GitWithoutEnd:
    """A sandbox in which git sends nothing, and every other program fails."""

    tier = SandboxTier("test", "git without end")

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.is_running = False

    async def start(self, capabilities: CapabilitySet, profile: SandboxProfile, program: ProgramSpec) -> Any:
        if "git" not in Path(program.argv[0]).name:
            await self.started.wait()
            raise ToolError("No search.", kind="unavailable")
        self.is_running = True
        self.started.set()
        return self

    async def read(self, _: int) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def kill(self) -> None:
        self.is_running = False


async def test_git_does_not_outlive_a_survey_that_failed(workspace: Path, tmp_path: Path) -> None:
    roots, endless = SessionRoots(workspace), _GitWithoutEnd()
    profile = SandboxProfile(roots.workspace, str(tmp_path))
    search = RipgrepSearch(roots, endless, profile, CapabilitySet(()), everything, HiddenFileRecord())
    with pytest.raises(ToolError, match="No search"):
        await search.survey_files(focus="giraffe")
    assert endless.started.is_set() and not endless.is_running


async def test_a_search_covers_a_folder_or_one_file(workspace: Path, searching: Searching) -> None:
    put(workspace, {"a/one.py": "here\n", "a/-rf": "here\n", "two.py": "here\n"})
    search = searching()
    assert lines(await search.grep("here", "a")) == [("a/-rf", 1, "here"), ("a/one.py", 1, "here")]
    assert lines(await search.grep("here", "a/-rf")) == [("a/-rf", 1, "here")]
    assert lines(await search.grep("here", str(workspace / "two.py"))) == [("two.py", 1, "here")]


async def test_a_search_can_ignore_case_and_take_literal_text(workspace: Path, searching: Searching) -> None:
    put(workspace, {"a": "f(x)\nF(X)\nfx\n"})
    search = searching()
    assert [line for _, line, _ in lines(await search.grep("f(x)", ignore_case=True, literal=True))] == [1, 2]
    assert [line for _, line, _ in lines(await search.grep("f(x)"))] == [3]
    assert [line for _, line, _ in lines(await search.grep("F"))] == [2]


async def test_ignore_files_apply_even_with_a_glob(workspace: Path, searching: Searching) -> None:
    put(workspace, {"a.py": "x", "built.py": "x", "node_modules/m.py": "x", ".hidden.py": "x", ".h/i.py": "x"})
    put(workspace, {".gitignore": "built.py\nnode_modules/\n", ".git/config": "x"})
    search = searching()
    for glob in (None, "*.py", "**/*.py", "*", "**", "*.{py,md}", "[a-z]*.py"):
        assert [path for path, _, _ in lines(await search.grep("x", glob=glob))] == ["a.py"], glob
    for pattern in ("*.py", "**/*.py", "*", "**", "{a,built}.py"):
        assert (await search.glob(pattern)).paths == ("a.py",), pattern
    assert (await search.glob("**/*", hidden=True)).paths == (".gitignore", ".h/i.py", ".hidden.py", "a.py")


@pytest.mark.parametrize(
    ("glob", "paths"),
    [
        ("*.py", ["a.py", "src/b.py", "src/deep/c.py"]),
        ("src/*.py", ["src/b.py"]),
        ("src/**/*.py", ["src/b.py", "src/deep/c.py"]),
        ("{src,doc}/**", ["doc/d.md", "src/b.py", "src/deep/c.py"]),
        ("!*.py", ["doc/d.md"]),
        ("!src", ["a.py", "doc/d.md"]),
        ("!src/deep", ["a.py", "doc/d.md", "src/b.py"]),
        ("?.m[a-f]", ["doc/d.md"]),
        ("*.none", []),
    ],
)
async def test_a_glob_limits_the_searched_files(
    workspace: Path, searching: Searching, glob: str, paths: list[str]
) -> None:
    put(workspace, {"a.py": "x", "src/b.py": "x", "src/deep/c.py": "x", "doc/d.md": "x"})
    assert [path for path, _, _ in lines(await searching().grep("x", glob=glob))] == paths


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("*.py", ("a.py",)),
        ("**/*.py", ("a.py", "src/b.py", "src/deep/c.py")),
        ("src/*", ("src/b.py",)),
        ("./src/**/c.*", ("src/deep/c.py",)),
        ("**/[bc].py", ("src/b.py", "src/deep/c.py")),
        ("src", ()),
    ],
)
async def test_a_glob_pattern_lists_files(
    workspace: Path, searching: Searching, pattern: str, paths: tuple[str, ...]
) -> None:
    put(workspace, {"a.py": "", "src/b.py": "", "src/deep/c.py": ""})
    assert (await searching().glob(pattern)).paths == paths


async def test_a_pattern_below_a_folder_is_matched_from_that_folder(workspace: Path, searching: Searching) -> None:
    put(workspace, {"src/a.py": "", "src/deep/b.py": ""})
    assert (await searching().glob("*.py", "src")).paths == ("src/a.py",)


async def test_a_search_stops_at_its_limit_and_is_marked_truncated(workspace: Path, searching: Searching) -> None:
    put(workspace, {"big.txt": "match\n" * 300_000, "small.txt": "match\n"})
    found = await searching().grep("match", max_matches=7)
    assert len(found.matches) == 7
    assert found.is_truncated
    put(workspace, {f"many/{n}": "" for n in range(50)})
    listed = await searching().glob("many/*", max_paths=10)
    assert len(listed.paths) == 10
    assert listed.is_truncated
    exact = await searching().grep("match", "small.txt", max_matches=1)
    assert len(exact.matches) == 1
    assert not exact.is_truncated


async def test_a_long_match_line_is_truncated(workspace: Path, searching: Searching) -> None:
    put(workspace, {"min.js": "needle" + "x" * 5_000_000 + "\n"})
    ((_, _, text),) = lines(await searching().grep("needle"))
    assert text.startswith("needlexxx")
    assert len(text) < 700


@pytest.mark.parametrize("pattern", ["(unclosed", "[z-a]", "(?=ahead)", r"\1", "(a{1000}){1000}{1000}", "a\nb"])
async def test_an_invalid_pattern_gives_an_error_that_explains_the_correction(
    workspace: Path, searching: Searching, pattern: str
) -> None:
    put(workspace, {"a": "a\n"})
    with pytest.raises(ToolError) as refused:
        await searching().grep(pattern)
    assert refused.value.kind == "invalid_input"
    assert "Correct the pattern" in str(refused.value)


@pytest.mark.parametrize("pattern", ["a\0b", "x" * 40_000])
async def test_an_unusable_search_pattern_is_refused(searching: Searching, pattern: str) -> None:
    with pytest.raises(ToolError, match="The pattern") as refused:
        await searching().grep(pattern)
    assert refused.value.kind == "invalid_input"


@pytest.mark.parametrize("glob", ["[z-a].py", "{a,b}" * 12])
async def test_an_invalid_glob_is_refused(searching: Searching, glob: str) -> None:
    with pytest.raises(ToolError) as refused:
        await searching().glob(glob)
    assert refused.value.kind == "invalid_input"


@pytest.mark.parametrize("pattern", ["-e", "--files", "--pre=touch pwned", "--", "-", "$(touch pwned)", "`id`"])
async def test_a_search_pattern_is_never_treated_as_an_option_or_a_command(
    workspace: Path, searching: Searching, pattern: str
) -> None:
    put(workspace, {"a.txt": f"has {pattern} in it\n", "-x": "none"})
    found = await searching().grep(pattern, literal=True)
    assert lines(found) == [("a.txt", 1, f"has {pattern} in it")]
    await searching().glob(f"{pattern}*")
    assert not (workspace / "pwned").exists()


async def test_a_pattern_that_backtracks_exponentially_in_other_engines_finishes(
    workspace: Path, searching: Searching
) -> None:
    put(workspace, {"a.txt": "a" * 20_000 + "!\n"})
    assert not (await searching().grep(r"^(a+)+$")).matches
    assert not (await searching().grep(r"^(a|a)*b$")).matches


async def test_file_names_with_any_bytes_are_distinguished_and_shown_safely(
    workspace: Path, searching: Searching
) -> None:
    folder = os.fsencode(workspace)
    for name in (b"new\nline", b"\xff\xfe", b"esc\x1b[31m", b"sp ace:12:x", b"7"):
        Path(os.fsdecode(folder + b"/" + name)).write_bytes(b"needle \xff\n")
    found = await searching().grep("needle")
    assert lines(found) == [
        (name, 1, "needle \ufffd")
        for name in ("7", "esc⟦U+001B⟧[31m", "new⟦U+000A⟧line", "sp ace:12:x", "⟦U+DCFF,DCFE⟧")
    ]
    assert set((await searching().glob("*")).paths) == {match.path for match in found.matches}


async def test_binary_files_do_not_affect_later_matches(workspace: Path, searching: Searching) -> None:
    late = b"needle\n" * 20_000 + b"\0\n" + b"needle\n"
    put(workspace, {"early.bin": b"needle\0needle\n", "late.bin": late, **{f"t{n}": "needle\n" for n in range(20)}})
    found = await searching().grep("needle", max_matches=100_000)
    paths = {match.path for match in found.matches}
    assert paths == {"late.bin", *(f"t{n}" for n in range(20))}
    assert not (await searching().grep("needle", "early.bin")).matches


async def test_a_file_named_like_a_ripgrep_note_does_not_expose_a_denied_file(
    workspace: Path, searching: Searching
) -> None:
    """A denied file whose name ends in what ripgrep says of a binary file, and another file's name."""
    note = 'a.txt: WARNING: stopped searching binary file after match (found "\\0" byte around offset 7)\nb.txt'
    put(workspace, {"a.txt": "needle", note: "needle of the denied file", "b.txt": "needle"})
    denied = note.rpartition("/")[2]
    found = await searching(nothing_like(denied)).grep("needle")
    assert "needle of the denied file" not in [match.text for match in found.matches]


def test_a_binary_file_note_is_removed_only_after_a_match_of_that_file() -> None:
    note = b'./a: WARNING: stopped searching binary file after match (found "\\0" byte around offset 7)\n'
    assert [
        path
        for path, *_ in RipgrepOutputParser().feed(b"./a\x001\x001\x000\x00x\n" + note + b"./b\x002\x001\x003\x00y\n")
    ] == [
        b"./a",
        b"./b",
    ]
    assert [path for path, *_ in RipgrepOutputParser().feed(note + b"./b\x002\x001\x003\x00y\n")] == [note + b"./b"]


async def test_a_search_omits_denied_files_and_reveals_nothing_of_their_content(
    workspace: Path, searching: Searching
) -> None:
    put(workspace, {"key.pem": "secret one\nsecret two\n", "a.txt": "secret three\n"})
    search = searching(nothing_like("key.pem"))
    hit = await search.grep("secret")
    assert lines(hit) == [("a.txt", 1, "secret three")]
    miss = await search.grep("secret th")
    assert (hit.denied_count, hit.is_truncated) == (miss.denied_count, miss.is_truncated)
    listed = await search.glob("*")
    assert (listed.paths, listed.denied_count) == (("a.txt",), 1)
    with pytest.raises(ToolError, match=r"key\.pem is denied") as refused:
        await search.grep("secret", "key.pem")
    assert refused.value.kind == "denied"


async def test_matches_in_denied_files_do_not_count_towards_the_limit(workspace: Path, searching: Searching) -> None:
    put(workspace, {"a.pem": "x\n" * 1000, "z.txt": "x\n"})
    found = await searching(nothing_like("a.pem")).grep("x", max_matches=1)
    assert lines(found) == [("z.txt", 1, "x")]
    assert not found.is_truncated


async def test_each_matched_file_is_checked_once(workspace: Path, searching: Searching) -> None:
    put(workspace, {"a.txt": "x\n" * 50, "b.txt": "x\n" * 50})
    asked: list[str | Sequence[str]] = []

    def may(_: Capability, target: str | Sequence[str]) -> str | None:
        asked.append(target)
        return None

    await searching(may).grep("x")
    assert sorted(map(str, asked)) == [str(workspace / "a.txt"), str(workspace / "b.txt")]


async def test_a_search_does_not_follow_links(workspace: Path, searching: Searching) -> None:
    put(workspace, {"real/a.txt": "TOP-SECRET\n"})
    (workspace / "out").symlink_to(workspace.parent / "ws_secret")
    (workspace / "loop").symlink_to(workspace)
    (workspace / "link.txt").symlink_to(workspace.parent / "ws_secret" / "key")
    found = await searching().grep("TOP-SECRET")
    assert [match.path for match in found.matches] == ["real/a.txt"]
    assert (await searching().glob("**")).paths == ("real/a.txt",)


@pytest.mark.parametrize("path", ["..", "../ws_secret", "/etc", "out", "/proc/self/root"])
async def test_a_search_outside_the_roots_is_refused(workspace: Path, searching: Searching, path: str) -> None:
    (workspace / "out").symlink_to(workspace.parent / "ws_secret")
    for attempt in (searching().grep("TOP", path), searching().glob("*", path)):
        with pytest.raises(ToolError) as refused:
            await attempt
        assert refused.value.kind == "denied"


async def test_another_root_is_searched_under_its_own_path(
    workspace: Path, tmp_path: Path, searching: Searching
) -> None:
    other = tmp_path.resolve() / "output"
    put(other, {"1.txt": "kept\n"})
    found = await searching(readable=[other]).grep("kept", str(other))
    assert lines(found) == [(str(other / "1.txt"), 1, "kept")]


async def test_a_search_path_that_is_not_a_file_or_folder_is_refused(workspace: Path, searching: Searching) -> None:
    os.mkfifo(workspace / "pipe")
    put(workspace, {"a.txt": "x\n"})
    assert lines(await searching().grep("x")) == [("a.txt", 1, "x")]
    for attempt in (
        searching().grep("x", "pipe"),
        searching().grep("x", "absent"),
        searching().grep("x", "a.txt/b"),
        searching().glob("*", "a.txt"),
    ):
        with pytest.raises(ToolError):
            await attempt


def children() -> set[int]:
    """All processes that this one started, and those that they started."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(folder.name)] = int(after_name[1])
    found = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found - {os.getpid()}


async def test_a_cancelled_search_leaves_no_process(workspace: Path, searching: Searching) -> None:
    put(workspace, {"a.txt": "x\n" * 2_000_000})
    reached, loop = asyncio.Event(), asyncio.get_running_loop()

    def may(_: Capability, __: str | Sequence[str]) -> str | None:
        loop.call_soon_threadsafe(reached.set)  # matches are judged in a thread
        return "not this one"

    before = children()
    task = asyncio.create_task(searching(may).grep("x"))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() <= before
    await searching().grep("x", max_matches=1)
    assert children() <= before


async def test_the_ripgrep_configuration_of_the_machine_is_ignored(
    workspace: Path, tmp_path: Path, searching: Searching, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = tmp_path / "ripgreprc"
    configuration.write_text("--files\n")
    monkeypatch.setenv("RIPGREP_CONFIG_PATH", str(configuration))
    put(workspace, {"a.txt": "x\n"})
    assert lines(await searching().grep("x")) == [("a.txt", 1, "x")]


pieces = st.lists(
    st.tuples(
        st.binary(min_size=1, max_size=8).map(lambda b: b.replace(b"\0", b"n")),
        st.integers(1, 99),
        st.binary(max_size=8).map(lambda b: b.replace(b"\n", b" ")),
    ),
    max_size=8,
)


@given(pieces, st.integers(1, 7))
def test_ripgrep_records_are_read_alike_in_pieces_of_any_size(
    records: list[tuple[bytes, int, bytes]], size: int
) -> None:
    stream = b"".join(b"%s\0%d\0%d\0%d\0%s\n" % (path, line, 1, line, text) for path, line, text in records)
    reader = RipgrepOutputParser()
    found: list[tuple[bytes, int, bytes]] = []
    for at in range(0, len(stream), size):
        found += [(one.path, one.line, one.text) for one in reader.feed(stream[at : at + size])]
    assert found == [(path, line, text.removesuffix(b"\r")) for path, line, text in records]  # of --crlf
    assert reader.rest == b""


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        ("a{b,c}d", ["abd", "acd"]),
        ("{a,b}{c,d}", ["ac", "ad", "bc", "bd"]),
        ("{a,{b,c}}", ["a", "b", "c"]),
        ("{a}", ["{a}"]),
        ("{a,b", ["{a,b"]),
        ("a}", ["a}"]),
        ("{,x}", ["", "x"]),
        ("{}{a,b}", ["{}a", "{}b"]),
    ],
)
def test_braces_expand_to_alternatives(pattern: str, plain: list[str]) -> None:
    assert expand_braces(pattern) == plain


@given(st.text(alphabet="{},a", max_size=30))
def test_expansion_of_any_braces_ends_within_its_limit(pattern: str) -> None:
    try:
        found = expand_braces(pattern)
    except ToolError as error:
        assert error.kind == "invalid_input"
    else:
        assert len(found) <= 256


@given(st.lists(st.sampled_from(["src", "a.py", "b.PY", "*.py", "**", ".x", "x.tar.gz"]), min_size=1, max_size=3))
def test_the_type_filter_for_ripgrep_never_excludes_a_wanted_file(parts: list[str]) -> None:
    """The filter for ripgrep from the last part must include every file that the whole pattern matches."""
    wanted = SearchPathFilter.parse("/".join(parts))
    types = [one.partition(":")[2] for one in wanted.build_arguments() if one.startswith("--type-add")]
    for path in ("a.py", "src/a.py", "src/src/b.py", "x.tar.gz", "src/x.tar.gz"):
        if wanted.matches(path) and types:
            name = path.rpartition("/")[2]
            assert any(SearchPathFilter.parse(one).matches(name) for one in types)


# ── races: what ripgrep opened is not what was judged ────────────────────────────────────────────


class NameDenials:
    """Denials that hide some names from programs."""

    has_read_only = False

    def __init__(self, *names: str) -> None:
        self.names = names
        self.key = self.read_denials_cache_key = names

    def is_hidden(self, path: str) -> bool:
        return not {*path.split("/")}.isdisjoint(self.names)

    def is_read_only(self, path: str) -> bool:
        return False

    def is_protected_write_allowed(self, path: str) -> bool:
        return False


Faking = Callable[[str], None]


@pytest.fixture
def faking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faking:
    """Puts a shell script in ripgrep's place; it works in the folder that is searched."""
    folder = tmp_path.resolve() / "bin"
    folder.mkdir()

    def fake(script: str) -> None:
        program = folder / "rg"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return fake


@pytest.fixture
def guarded(workspace: Path, tmp_path: Path) -> Searching:
    """Makes a search door as a kernel has it, with what is hidden and what may be read."""
    confining = choose_sandbox()
    if not confining.tier.is_confining:
        pytest.skip(confining.tier.detail)
    scratch = tmp_path.resolve() / "scratch"
    scratch.mkdir()
    sandbox = GuardedSandbox(confining)

    def make(may: AccessCheck, hides: NameDenials, hidden: HiddenFileRecord | None = None) -> RipgrepSearch:
        whole = CapabilityLayer("test", fs_read=(str(workspace),))
        profile = SandboxProfile(str(workspace), str(scratch), denials=hides)
        roots, capabilities = SessionRoots(workspace), CapabilitySet((whole,))
        return RipgrepSearch(
            roots, sandbox, profile, capabilities, may, HiddenFileRecord() if hidden is None else hidden
        )

    return make


async def test_a_match_missing_from_the_judged_file_is_not_shown(
    workspace: Path, searching: Searching, faking: Faking
) -> None:
    """ripgrep listed a file and opened a link that took its place: it reports the other file's line under this name."""
    put(workspace, {"notes.txt": "plain\n", ".env": "KEY=secret\n", "true.txt": "x\nKEY=true\n"})
    faking(
        r"printf './notes.txt\0001\0001\0000\000KEY=secret\n'; printf './true.txt\0002\0001\0002\000KEY=true\n';"
        r"printf './true.txt\0002\0001\0000\000KEY=true\n'; printf './gone.txt\0001\0001\0000\000KEY=secret\n'"
    )
    assert lines(await searching(nothing_like(".env")).grep("KEY")) == [("true.txt", 2, "KEY=true")]


@pytest.mark.parametrize("link", ["notes.txt", "folder"])
async def test_matches_and_names_behind_a_link_to_a_denied_file_are_not_shown(
    workspace: Path, searching: Searching, faking: Faking, link: str
) -> None:
    put(workspace, {"private/.env": "KEY=secret\n"})
    target = "private/.env" if link == "notes.txt" else "private"
    (workspace / link).symlink_to(target)
    name = link if link == "notes.txt" else "folder/.env"
    faking(rf"printf './{name}\0001\0001\0000\000KEY=secret\n'")
    search = searching(nothing_like("private"))
    assert lines(await search.grep("KEY")) == []
    faking(rf"printf './{name}\000'")
    assert (await search.glob("**", hidden=True)).paths == ()


async def test_names_from_a_folder_reached_through_a_swapped_link_are_not_listed(
    workspace: Path, searching: Searching, faking: Faking
) -> None:
    """ripgrep followed a link that briefly replaced a folder, and lists files behind it."""
    put(workspace, {"open/a.txt": "x", "private/customer-list.txt": "x"})
    faking(r"printf './open/a.txt\000./open/customer-list.txt\000./open/\000'")
    assert (await searching(nothing_like("private")).glob("**")).paths == ("open/a.txt",)


@pytest.mark.parametrize("how", ["link", "rename"])
async def test_a_hidden_file_is_not_shown_under_another_name(workspace: Path, guarded: Searching, how: str) -> None:
    """Known from an earlier search: its content is hidden under whatever name it has."""
    put(workspace, {".env": "KEY=secret\n", "a.txt": "KEY=a\n"})
    search = guarded(nothing_like(".env"), NameDenials(".env"))
    assert lines(await search.grep("KEY")) == [("a.txt", 1, "KEY=a")]
    if how == "link":
        os.link(workspace / ".env", workspace / "notes.txt")
    else:
        (workspace / ".env").rename(workspace / "notes.txt")
    assert lines(await search.grep("KEY")) == [("a.txt", 1, "KEY=a")]
    (workspace / "notes.txt").unlink()
    put(workspace, {"notes.txt": "KEY=of a new file\n"})
    assert ("notes.txt", 1, "KEY=of a new file") in lines(await search.grep("KEY"))


async def test_a_file_recorded_as_hidden_is_not_read_under_another_name(workspace: Path) -> None:
    put(workspace, {".env": "KEY=secret\n"})
    os.link(workspace / ".env", workspace / "notes.txt")
    hidden = HiddenFileRecord()
    hidden.record_hidden_files([str(workspace / ".env")])
    files = RootedFiles(SessionRoots(workspace), SeenFileHashes(), nothing_like(".env"), hidden)
    with pytest.raises(ToolError, match=r"`notes\.txt` is the same file as a hidden file") as refused:
        await files.read_bytes("notes.txt")
    assert refused.value.kind == "denied"
    with pytest.raises(ToolError, match="same file"):
        await files.read_lines("notes.txt")
    with pytest.raises(ToolError, match="same file"):
        await files.read_for_edit("notes.txt")
    allowing = RootedFiles(SessionRoots(workspace), SeenFileHashes(), everything, hidden)
    assert (await allowing.read_bytes("notes.txt")).data == b"KEY=secret\n"


async def test_a_file_whose_read_was_denied_is_not_read_under_another_name(workspace: Path) -> None:
    put(workspace, {".env": "KEY=secret\n"})
    files = RootedFiles(SessionRoots(workspace), SeenFileHashes(), nothing_like(".env"))
    with pytest.raises(ToolError, match="is denied"):
        await files.read_bytes(".env")
    (workspace / ".env").rename(workspace / "notes.txt")
    with pytest.raises(ToolError, match="same file"):
        await files.read_bytes("notes.txt")


async def test_the_search_program_cannot_read_hidden_files(workspace: Path, guarded: Searching, faking: Faking) -> None:
    put(workspace, {".env": "KEY=secret\n", "private/a.txt": "KEY=secret\n", "a.txt": "x"})
    (workspace / "way").symlink_to(".env")
    (workspace / "folder").symlink_to("private")
    faking("cat .env private/a.txt way folder/a.txt; ls private folder/; exit 3")
    with pytest.raises(ToolError, match="exit code 3") as failed:
        await guarded(nothing_like(".env", "private"), NameDenials(".env", "private")).grep("KEY")
    assert "secret" not in failed.value.text
    assert "a.txt\n" not in failed.value.text


async def test_a_search_includes_a_hidden_file_that_the_call_may_read(workspace: Path, guarded: Searching) -> None:
    put(workspace, {"config.env": "KEY=mine\n", "private/a.txt": "KEY=deep\n", "private/b.txt": "KEY=no\n"})
    hides = NameDenials("config.env", "private")
    assert lines(await guarded(everything, hides).grep("KEY", "config.env")) == [("config.env", 1, "KEY=mine")]
    allowed = nothing_like("private", "b.txt")
    assert lines(await guarded(allowed, hides).grep("KEY", "private/a.txt")) == [("private/a.txt", 1, "KEY=deep")]
    assert lines(await guarded(nothing_like("config.env", "private"), hides).grep("KEY", ".")) == []


async def test_matched_lines_of_any_encoding_and_length_are_verified(workspace: Path, searching: Searching) -> None:
    long = "needle " + "é" * 700
    put(
        workspace,
        {
            "u16le": b"\xff\xfe" + "first\nneedle é\nneedle 2\n".encode("utf-16-le"),
            "u16be": b"\xfe\xff" + "first\nneedle é\n".encode("utf-16-be"),
            "marked": b"\xef\xbb\xbfneedle 1\nx\nneedle 3\n",
            "latin": b"needle \xe9\n",
            "crlf": "x\r\nneedle\r\n",
            "end": "x\nneedle",
            "long": f"x\n{long}\n{long} needle\n",
            "named": "needle [... omitted end of long line]\n",
        },
    )
    found = lines(await searching().grep("needle"))
    assert [(path, line) for path, line, _ in found] == [
        ("crlf", 2),
        ("end", 2),
        ("latin", 1),
        ("long", 2),
        ("long", 3),
        ("marked", 1),
        ("marked", 3),
        ("named", 1),
        ("u16be", 2),
        ("u16le", 2),
        ("u16le", 3),
    ]
    assert {path: text for path, _, text in found}["named"] == "needle [... omitted end of long line]"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("what", ["link", "folder", "exchange"])
async def test_a_race_with_a_search_never_reveals_a_hidden_file(workspace: Path, guarded: Searching, what: str) -> None:
    """A file, a folder, or the hidden file itself changes places with another one as fast as it goes."""
    put(workspace, {".env": "KEY=secret\n", "private/f": "KEY=secret\n", "d/f": "KEY=d\n", "notes.txt": "KEY=n\n"})
    put(workspace, {f"many/{n:03}/f": "KEY=many\n" for n in range(200)})
    (workspace / "to-env").symlink_to(".env")
    (workspace / "to-private").symlink_to("private")
    pairs = {"link": ("notes.txt", "to-env"), "folder": ("d", "to-private"), "exchange": ("notes.txt", ".env")}
    one, other = (workspace / name for name in pairs[what])
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            exchange(one, other)

    may = nothing_like(".env", "private")

    def judged(capability: Capability, target: str | Sequence[str]) -> str | None:
        return may(capability, target) or ("denied" if "/private/" in str(target) else None)

    search = guarded(judged, NameDenials(".env", "private"))
    if what == "exchange":
        await search.grep("KEY")  # the session has met both of what changes places
        exchange(one, other)
        await search.grep("KEY")
    thread = threading.Thread(target=swap)
    thread.start()
    answered = 0
    try:
        for _ in range(40):
            try:
                found = await search.grep("KEY")
            except ToolError as error:  # what was to be mounted over changed places meanwhile
                assert error.kind in ("conflict", "unavailable", "backend"), error.text
                continue
            assert "secret" not in repr(found)
            assert len(found.matches) >= 200
            answered += 1
    finally:
        stop.set()
        thread.join()
    assert answered > 0 or what == "exchange"  # a mount over what changes places may end each search


def exchange(one: Path, other: Path) -> None:
    """Have two names change places, with no moment without either (RENAME_EXCHANGE)."""
    if ctypes.CDLL(None).renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2) != 0:
        raise OSError("renameat2")


def test_a_long_ripgrep_error_is_parsed_and_its_cause_is_kept() -> None:
    error = make_ripgrep_exit_error(
        2, b"rg: regex parse error:\n" + b"[" * 2_000_000 + b"\nerror: unclosed character class\n"
    )
    assert error is not None and error.kind == "invalid_input" and "unclosed character class" in error.text
    note = b'a.txt: binary file matches (found "\\0" byte around offset 7)\n'
    assert make_ripgrep_exit_error(2, note * 3) is None
    said = make_ripgrep_exit_error(2, note * 2 + b"rg: b.txt: no such file")
    assert said is not None and said.text.startswith("ripgrep failed with exit code 2: rg: b.txt: no such file.")
