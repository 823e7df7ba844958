"""The checked path, glob, host and rule is always the one that is used, for any input."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.policy.desk import AuthorizerFixture

from handrail.contract.errors import ToolError
from handrail.contract.text.glob_patterns import escape_glob_literal, matches_path_glob
from handrail.contract.text.host_names import grant_covers_host, parse_host_address, parse_http_url, rule_matches_host
from handrail.contract.text.public_addresses import explain_blocked_address
from handrail.contract.tool.requires import Capability
from handrail.runtime.files.rooted_file_service import RootedFiles, SeenFileHashes
from handrail.runtime.files.session_roots import SessionRoots

SECRET = "TOP-SECRET"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of files that contain their own path, and links of every kind, next to a secret."""
    folder = tmp_path_factory.mktemp("properties").resolve()
    ws = folder / "ws"
    for name in ("a", "src/b", "src/deep/c", "..a", ".git/config", "sp ace", "ws", "é"):
        (ws / name).parent.mkdir(parents=True, exist_ok=True)
        (ws / name).write_text(str(ws / name))
    for name in ("ws_secret/key", "key"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(SECRET)
    links = {"up": "..", "self": ".", "in": "src/deep", "out": str(folder / "ws_secret"), "file": "src/b", "key": "../key", "magic": "/proc/self/root",
             "loop": "loop", "far": "/etc", "src/back": "../a", "src/deep/up2": "../../.."}  # fmt: skip
    for name, to in links.items():
        (ws / name).symlink_to(to)
    return ws


_PARTS = st.sampled_from(
    ["a", "b", "c", "src", "deep", "..", ".", "", "up", "self", "in", "out", "file", "key", "magic", "loop", "far", "back", "up2", "ws", "ws_secret",
     "..a", ".git", "config", "sp ace", "é", "e\u0301", "~", "*", "\0", "\n", "\udcff", "proc", "cwd", "root", "A", "a ", "a.", "nothing"]
)  # fmt: skip
_PATHS = st.tuples(st.sampled_from(["", "", "", "/", "//", "./", "WS/", "WS_secret/", "/proc/self/cwd/", "/proc/self/root/WS/", "/dev/fd/"]), st.lists(_PARTS, max_size=7)).map(
    lambda drawn: drawn[0] + "/".join(drawn[1])
)  # fmt: skip


@pytest.mark.attack("files")
@pytest.mark.proves("S-03")
@settings(max_examples=3 * settings().max_examples)
@given(_PATHS)
@example("magic/proc/self/cwd/../key")
@example("in/../../key")
@example("src/deep/up2/key")
def test_the_file_that_is_opened_is_the_file_that_was_checked(place: Path, path: str) -> None:
    path = path.replace("WS", str(place))
    judged: list[str] = []

    def may(capability: Capability, target: str | Sequence[str]) -> str | None:
        assert isinstance(target, str)
        judged.append(target)
        return None

    files = RootedFiles(SessionRoots(place), SeenFileHashes(), may)
    try:
        got = asyncio.run(files.read_bytes(path))
    except ToolError as error:
        assert SECRET not in error.text
        return
    text = got.data.decode()
    assert judged == [text], "each file holds its own real path"
    assert os.path.realpath(text) == text and text.startswith(f"{place}/")
    assert place / got.path == Path(text), "and is told under it"


_NAMES = st.text(st.sampled_from("ab*?[]!-.\\{} é~"), min_size=1, max_size=6).filter(
    lambda name: name not in (".", "..")
)
_TREE = st.lists(_NAMES, min_size=1, max_size=4).map("/".join)


@pytest.mark.attack("files")
@given(_TREE, _TREE)
def test_an_escaped_path_matches_only_that_path_and_paths_below_it(one: str, other: str) -> None:
    assert matches_path_glob(escape_glob_literal(one), one)
    assert matches_path_glob(escape_glob_literal(one), other) == (other == one or other.startswith(f"{one}/"))


_LABELS = st.text(st.sampled_from("abA-0x7f1.①²。%\0\r\n @:/\\#?[]_é\u200b"), max_size=12)
_HOSTS = st.one_of(
    _LABELS,
    st.sampled_from(["allowed.example", "ALLOWED.example.", "127.0.0.1", "0x7f.1", "2130706433", "0177.0.0.1", "[::1]", "::ffff:127.0.0.1", "127.1", "１２７.0.0.1"]),
    st.integers(0, 2**32 - 1).map(str),
    st.ip_addresses().map(str),
)  # fmt: skip
_URLS = st.tuples(
    st.sampled_from(["http://", "https://", "HTTP://", "file://", "//", "http:/\\"]), _HOSTS, _LABELS, _HOSTS
).map(lambda parts: f"{parts[0]}{parts[1]}{parts[2]}{parts[3]}")


@pytest.mark.attack("network")
@settings(max_examples=3 * settings().max_examples)
@given(_URLS)
def test_the_host_that_is_checked_is_the_host_that_other_url_parsers_read(url: str) -> None:
    """Ambiguous hosts are refused; accepted ones are one name or one address."""
    try:
        address = parse_http_url(url)
    except ValueError:
        return
    seen = urlsplit(url).hostname
    assert seen is not None
    if address.host.address is not None:
        assert str(ip_address(seen.rstrip("."))) == str(address.host.address)
    else:
        assert seen.rstrip(".").lower() == address.host.name
        assert address.host.name.isascii() and not any(c in address.host.name for c in "\0\r\n @:/\\#?%[]")
        assert not address.host.name.replace(".", "").isdigit(), "a number is an address to some and a name to others"


@pytest.mark.attack("network")
@given(_HOSTS, _HOSTS)
def test_a_grant_for_a_host_does_not_cover_longer_host_names(one: str, other: str) -> None:
    try:
        first, second = parse_host_address(one), parse_host_address(other)
    except ValueError:
        return
    if rule_matches_host(str(first), str(second)):
        assert first.name == second.name
    assert not rule_matches_host("allowed.example", f"evil{first.name}x")
    assert not grant_covers_host("allowed.example", f"{first.name}.allowed.example.evil")


@pytest.mark.attack("network")
@given(st.ip_addresses(v=4), st.sampled_from(["::ffff:{}", "64:ff9b::{}", "::{}"]))
def test_a_blocked_address_stays_blocked_in_every_embedded_form(address: object, form: str) -> None:
    inner = ip_address(str(address))
    if explain_blocked_address(inner) is not None:
        assert explain_blocked_address(ip_address(form.format(inner))) is not None


_ACTIONS = st.sampled_from(["allow", "ask", "deny"])
_WORDS = st.sampled_from(["ls", "rm", "git", "status", "push", "-f", "x", "*", "'*'", "'a b'", "-*", "--force"])
_RULES = st.lists(st.tuples(_ACTIONS, st.lists(_WORDS, min_size=1, max_size=4)), max_size=4)
_COMMANDS = st.lists(st.lists(st.sampled_from(["ls", "rm", "git", "status", "push", "-f", "x", "'*'", "'a b'", "--force"]), min_size=1, max_size=4), min_size=1, max_size=3)  # fmt: skip
_STRICT = {"allow": 0, "ask": 1, "deny": 2}


def _book(rules: list[tuple[str, list[str]]]) -> list[str]:
    return [f"{action} bash {' '.join(words)}" for action, words in rules]


@pytest.mark.attack("permission")
@settings(max_examples=3 * settings().max_examples)
@given(_RULES, _COMMANDS, st.sampled_from([" && ", "; ", " | ", "\n", " || "]))
def test_a_compound_command_gets_the_strictest_decision_of_its_parts(
    desk: AuthorizerFixture, rules: list[tuple[str, list[str]]], commands: list[list[str]], joint: str
) -> None:
    book = _book(rules)
    texts = [" ".join(command) for command in commands]
    whole = desk.bash(joint.join(texts), *book).action
    assert _STRICT[whole] == max(_STRICT[desk.bash(text, *book).action] for text in texts)


@pytest.mark.attack("permission")
@settings(max_examples=3 * settings().max_examples)
@given(_RULES, _COMMANDS)
def test_another_deny_rule_never_makes_a_decision_milder(
    desk: AuthorizerFixture, rules: list[tuple[str, list[str]]], commands: list[list[str]]
) -> None:
    text = " && ".join(" ".join(command) for command in commands)
    before = desk.bash(text, *_book(rules)).action
    after = desk.bash(text, *_book(rules), f"deny bash {commands[0][0]} *").action
    assert after == "deny" or _STRICT[after] >= _STRICT[before]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> AuthorizerFixture:
    return AuthorizerFixture(tmp_path_factory.mktemp("rules"))
