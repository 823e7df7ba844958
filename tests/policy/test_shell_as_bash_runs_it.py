"""Every command that bash runs from an understood text is also judged. Bash runs stubs in a sandbox."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from handrail.policy.shell.parser import parse_script
from handrail.policy.shell.simple_commands import ANY_TEXT, GLOB, NO_OPTION, SPLIT

BWRAP = shutil.which("bwrap")
BASH = shutil.which("bash")
pytestmark = [
    pytest.mark.proves("P-05"),
    pytest.mark.skipif(BWRAP is None or BASH is None, reason="needs bubblewrap and bash"),
]

STUB = """#!/bin/sh
printf '%s\\0' "${0##*/}" "$@" > "$LOG/$$"
case "${0##*/}" in p1) echo "-x  out *"; exit 1;; p2) echo "a b";; p3) cat >/dev/null 2>&1;; esac
exit 0
"""
PROGRAMS = ("p0", "p1", "p2", "p3", "rm", "wc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stubs, and a work folder with files whose names are hard."""
    top = tmp_path_factory.mktemp("bash")
    (top / "bin").mkdir()
    for name in PROGRAMS:
        (top / "bin" / name).write_text(STUB)
        (top / "bin" / name).chmod(0o755)
    (top / "work" / "sub").mkdir(parents=True)
    for name in ("a.py", "-x.py", "b c.py", "sub/d.py", ".hidden"):
        (top / "work" / name).write_text("one\ntwo words\n")
    return top


def run(folder: Path, text: str) -> list[list[str]]:
    """Return the argv of every stub that bash started for ``text``."""
    log = folder / "log"
    shutil.rmtree(log, ignore_errors=True)
    log.mkdir()
    assert BWRAP is not None and BASH is not None
    subprocess.run(
        [BWRAP, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--bind", str(folder), str(folder), "--unshare-all",
         "--die-with-parent", "--chdir", str(folder / "work"), "--clearenv", "--setenv", "PATH", str(folder / "bin"),
         "--setenv", "HOME", "/home/x", "--setenv", "LOG", str(log), BASH, "--norc", "--noprofile", "-c", text],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False,
    )  # fmt: skip
    return [[word.decode() for word in one.read_bytes().split(b"\0")[:-1]] for one in log.iterdir()]


def pattern(argv: tuple[str, ...]) -> re.Pattern[str]:
    """Return an expression for what the shell may make of a judged command, its words joined by NUL."""
    out = ""
    for place, word in enumerate(argv):
        many = SPLIT in word or GLOB in word
        known = {SPLIT: ".*", GLOB: ".*", ANY_TEXT: "[^\0]*", NO_OPTION: "[^\0]*"}
        text = "".join(known.get(char) or re.escape(char) for char in word)
        text = f"(?!-){text}" if word[:1] == NO_OPTION else text
        joint = "\0" if place else ""
        out += f"(?:{joint}{text})?" if many else joint + text
    return re.compile(out, re.DOTALL)


WORD = st.sampled_from(
    ["x", "-y", "'q r'", '"d"', "*.py", "sub/*", "?.py", "[ab].py", "{a,-b}", "s{1..2}", "~", "HEAD~1", "@{0}", "{}", "$v", '"$v"', '"a$v"', "$?", '"$HOME"',
     "$(p1)", '"$(p1)"', "$(p2 z)", '"$(p0 "$v" | p3)"', "${v}", "${v%.py}", '"${v:-d}"', "x=1", "\\*", "'$v'", "a\\ b", "'it'\\''s'", "#c", "'#'", "!", "\"$v\"*"]
)  # fmt: skip
SIMPLE = st.builds(
    lambda name, words, tail: " ".join([name, *words]) + tail,
    st.sampled_from([*PROGRAMS, "v=1 p0", "w=$(p0) wc", "'rm'", "r\\m", "! p0", "[ -f a.py ] && p0", "cd sub &&  p0", "export w=1;  p0"]),
    st.lists(WORD, max_size=3),
    st.sampled_from(["", "", "", " 2>&1", " > /dev/null", " <<< x", " < a.py", " &", " <<'E'\n$(rm no) `rm no`\nE\n", " <<E\n$(p0 in) $v \\$(rm no)\nE\n"]),
)  # fmt: skip


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds(lambda a, s, b: f"{a}{s}{b}", inner, st.sampled_from(["; ", " && ", " || ", " | ", "\n", " |& ", " & "]), inner),
        st.builds(lambda a: f"( {a}\n)", inner),
        st.builds(lambda a: f"{{ {a}\n}}", inner),
        st.builds(lambda a, b, c: f"if {a}\nthen {b}\nelse {c}\nfi", inner, inner, inner),
        st.builds(lambda w, a: f"for v in {' '.join(w)}; do {a}\ndone", st.lists(WORD, max_size=3), inner),
        st.builds(lambda a: f"while read -r v; do {a}\ndone < a.py", inner),
        st.builds(lambda a, b: f"until {a}\ndo {b}\nbreak\ndone", inner, inner),
        st.builds(lambda a: f"p0 \"$({a}\n)\"", inner),
    )  # fmt: skip


TEXTS = st.recursive(SIMPLE, _compound, max_leaves=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(text=TEXTS)
@example(text='for v in *.py; do wc "$v"; done')
@example(text="for v in sub/*; do v=-z; wc $v; done")
@example(text="for v in a b; do p0 $v; read v < a.py; done; rm $v")
@example(text="p0 $(p1 <<'E'\n)\nE\n) x")
@example(text="p0 <<A <<'B'\n$(rm in)\nA\n$(rm no)\nB\nwc")
@example(text='p0 "$(wc <<E\n$(rm deep)\nE\n)"')
@example(text="if p0; then cd sub; fi; wc *.py")
@example(text="! p0 | wc; ( p1 ) || { rm x; }")
@example(text='[ "$(p0)" = x ] || [[ $(p2) == a* ]] && wc')
@example(text="v=x p0 # rm y\nwc '# no' \\\n  -l")
def test_the_parser_finds_every_command_that_bash_runs(folder: Path, text: str) -> None:
    script = parse_script(text)
    if script.unclear is not None:
        return
    judged = [pattern(command.argv) for command in script.commands]
    for argv in run(folder, text):
        assert any(one.fullmatch("\0".join(argv)) for one in judged), (argv, script.commands)


def test_the_stub_programs_record_each_command_that_bash_runs(folder: Path) -> None:
    assert sorted(run(folder, 'for v in *.py; do wc "$v"; done; p0 $(p2) | p3')) == [
        ["p0", "a", "b"],
        ["p2"],
        ["p3"],
        ["wc", "-x.py"],
        ["wc", "a.py"],
        ["wc", "b c.py"],
    ]
