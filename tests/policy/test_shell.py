"""The shell reader: what it understands, what it refuses, and nothing in between."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from handrail.policy.shell import parser
from handrail.policy.shell.parser import parse_script
from handrail.policy.shell.reader import MAX_COMMANDS
from handrail.policy.shell.simple_commands import ANY_TEXT, GLOB, NO_OPTION, SPLIT

PLAIN: list[tuple[str, list[list[str]]]] = [
    ("ls", [["ls"]]),
    ("  ls  -l\t-a ", [["ls", "-l", "-a"]]),
    ("kill -9 1", [["kill", "-9", "1"]]),
    ("head -5", [["head", "-5"]]),
    ("12 3.5 -0x1f +3", [["12", "3.5", "-0x1f", "+3"]]),
    ("git commit -m 'it''s' \"a b\"c'd'", [["git", "commit", "-m", "its", "a bcd"]]),
    ('echo "a\\"b" "c\\$d" "e\\\\f" "g\\h" "`"'.replace(' "`"', ""), [["echo", 'a"b', "c$d", "e\\f", "g\\h"]]),
    ("echo a\\ b \\$HOME \\* \\'", [["echo", "a b", "$HOME", "*", "'"]]),
    ("echo '$HOME `x` * ~ {a,b} \\n'", [["echo", "$HOME `x` * ~ {a,b} \\n"]]),
    ("echo '' \"\"", [["echo", "", ""]]),
    ("a && b || c; d | e\nf", [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
    ("a &&\n  b", [["a"], ["b"]]),
    ("a |\n# why\nb", [["a"], ["b"]]),
    ("\n\nls\n\n", [["ls"]]),
    ("ls;", [["ls"]]),
    ("ls # rm -rf /", [["ls"]]),
    ("echo a#b 'c'#d", [["echo", "a#b", "c#d"]]),
    ("ls >/dev/null 2>&1", [["ls"]]),
    ("ls 2> /dev/null | wc -l", [["ls"], ["wc", "-l"]]),
    ("ls &>/dev/null", [["ls"]]),
    ("cat </dev/null >>/dev/null", [["cat"]]),
    ("2>&1 ls", [["ls"]]),
    ("echo x >&2", [["echo", "x"]]),
    ("echo 'two\nlines'", [["echo", "two\nlines"]]),
    ("echo é 'ü' \"ß\"", [["echo", "é", "ü", "ß"]]),
    ("echo !x a=b a:b @x %y ^z", [["echo", "!x", "a=b", "a:b", "@x", "%y", "^z"]]),
    ("time ls", [["time", "ls"]]),
    ("./run.sh", [["./run.sh"]]),
    ("'ls' -l", [["ls", "-l"]]),
    ("\\rm x", [["rm", "x"]]),
    ("r'm' x", [["rm", "x"]]),
    ("let x=1", [["let", "x=1"]]),
]


@pytest.mark.proves("P-05")
@pytest.mark.parametrize(("text", "argvs"), PLAIN, ids=[text for text, _ in PLAIN])
def test_the_parser_reads_simple_commands_as_a_shell_does(text: str, argvs: list[list[str]]) -> None:
    script = parse_script(text)
    assert script.unclear is None
    assert [list(command.argv) for command in script.commands] == argvs


OPENED: list[tuple[str, list[tuple[str, str]]]] = [
    ("ls > out", [("fs.write", "out")]),
    ("ls >out 2>&1", [("fs.write", "out")]),
    ("> out", [("fs.write", "out")]),
    ("< in", [("fs.read", "in")]),
    ("ls; > out", [("fs.write", "out")]),
    ("if true; then > out; fi", [("fs.write", "out")]),
    (">/dev/null", []),
    ("ls >> out", [("fs.write", "out")]),
    ("ls >| out", [("fs.write", "out")]),
    ("ls 2> out", [("fs.write", "out")]),
    ("ls 2>>out", [("fs.write", "out")]),
    ("ls &> out", [("fs.write", "out")]),
    ("ls &>> out", [("fs.write", "out")]),
    ("ls >& out", [("fs.write", "out")]),
    ("ls 10> out", [("fs.write", "out")]),
    ("sort < in", [("fs.read", "in")]),
    ("sort < in > out", [("fs.read", "in"), ("fs.write", "out")]),
    ("> out ls a", [("fs.write", "out")]),
    ("ls > a > b", [("fs.write", "a"), ("fs.write", "b")]),
    ("ls > 'a b'", [("fs.write", "a b")]),
    ("ls > a\\ 'b'\"c\"", [("fs.write", "a bc")]),
    ("a && b > x | c < y", [("fs.write", "x"), ("fs.read", "y")]),
    ("ls > /dev/null2", [("fs.write", "/dev/null2")]),
    ("ls > /dev/null/../../etc/x", [("fs.write", "/dev/null/../../etc/x")]),
    ("cd src && ls > /abs/out", [("fs.write", "/abs/out")]),
    ("ls > /dev/null 2> /dev/stderr", []),
]


@pytest.mark.proves("P-05")
@pytest.mark.parametrize(("text", "opened"), OPENED, ids=[text for text, _ in OPENED])
def test_the_parser_finds_the_files_that_redirections_open_as_a_shell_does(
    text: str, opened: list[tuple[str, str]]
) -> None:
    script = parse_script(text)
    assert script.unclear is None
    assert [(file.capability, file.target) for file in script.files] == opened


UNCLEAR: list[tuple[str, str]] = [
    ("$x y", "names a command"),
    ("$(echo rm) x", "names a command"),
    ("~/bin/x", "names a command"),
    ("PATH=. ls", "the variable PATH"),
    ("for PATH in a; do ls; done", "the variable PATH"),
    ("GIT_DIR=x git log", "the variable GIT_DIR"),
    ("FOO=1 uv run zip a b", "the variable FOO"),
    ("FOO=1 poetry run --quiet zip a b", "the variable FOO"),
    ("IFS=x read y", "the variable IFS"),
    ("[[ $x -eq 1 ]]", "as numbers"),
    ("[[ -v x ]]", "a test with -v"),
    ("[ -f x", ""),
    ("echo ${x:=y}", "expansion"),
    ("echo ${!x}", "expansion"),
    ("echo $((x))", "arithmetic"),
    ("echo $[1+1]", "expansion"),
    ("cat <<E\nx", ""),
    ("cat <<$x\na\n$x", ""),
    ("cat <<E\n`x`\nE", ""),
    ("cd $x && ls > out", "changes the folder"),
    ("cd && ls > out", "changes the folder"),
    ("for d in a b; do cd a; ls > out; done", "changes the folder"),
    ("echo a=~/x", "'~'"),
    ("if true; then ls", ""),
    ("(ls", ""),
    ("for x; do ls; done", ""),
    ("x={a,b} ls $x; f() { rm x; }", ""),
    ("echo ${x@P}", "expansion"),
    ("ls$IFS-l", "names a command"),
    ("echo `rm x`", "backquotes"),
    ('echo "a`rm x`b"', "backquotes"),
    ("echo $((1+1))", "expansion"),
    ("cat <(rm x)", "process substitution"),
    ("tee >(rm x)", "process substitution"),
    ("echo $'\\x72m'", "$'…'"),
    ('echo $"x"', "$"),
    ("for ((;;)); do x; done", "loop"),
    ("case x in *) rm x;; esac", "case"),
    ("f() { rm x; }; f", "function"),
    ("function f { rm x; }", "function"),
    ("x=1", "no command"),
    ("a[0]=1", "assignment"),
    ("LD_PRELOAD=./x.so ls", "the variable LD_PRELOAD"),
    ("declare -n x=y", "declaration"),
    ("readonly x", "declaration"),
    ("unset PATH", "unset"),
    ("a;;b", ";;"),
    ("ls <> f", ""),
    ("ls 2>&1x", "redirects"),
    ("ls 2>&-", ""),
    ("cat < /dev/tcp/1.2.3.4/80", "redirects"),
    ("X=1 > out", ""),
    ("ls > a b", "ambiguous"),
    ("ls > $x", "expand"),
    ("ls > *", "'*'"),
    ("ls > ~/x", "expand"),
    ("ls > x{1,2}", "expand"),
    ("ls > $(x)", "expand"),
    ("ls > ''", "redirects"),
    ("ls 2>& out", "redirects"),
    ("ls >&2x", "redirects"),
    ("ls >&1-", "redirects"),
    ("ls > /dev/udp/a/1", "network"),
    ("ls < /dev/fd/3", "descriptor"),
    ("ls < /dev/stdin", "descriptor"),
    ("ls > 'a\tb", "syntax"),
    ("pushd src && cat < in", "changes the folder"),
    ("command cd src && ls > out", "changes the folder"),
    ("builtin cd src; ls > out", "changes the folder"),
    (". setup && ls > out", "changes the folder"),
    ("ls {fd}>/dev/null", ""),
    ("ls >/dev/null x", ""),
    ("shopt -s extglob; ls !(x)", ""),
    ("ls +(x)", ""),
    ("echo 'open", "syntax"),
    ('echo "open', "syntax"),
    ("a &&", ""),
    ("&& a", ""),
    ("| a", ""),
    ("; a", ""),
    ("a ;; b", ";;"),
    ("", "no command"),
    ("   \n ", "no command"),
    ("# only a comment", "no command"),
    ("ls\\\n-l", "line continuation"),
    ("l\\\ns", "line continuation"),
    ("ls \\", ""),
    ("ls\0rm", "U+0000"),
    ("ls\rrm", "U+000D"),
    ("ls\x1b[2K", "U+001B"),
    ("ls \x7f", "U+007F"),
    ("ls \x85", "U+0085"),
    ("ls \u202erm", "U+202E"),
    ("ls\u200brm", "U+200B"),
    ("ls\u00a0-l", "U+00A0"),
    ("ls\u2028rm", "U+2028"),
    ("ls \U000e0041", "U+E0041"),
    ("ls \ud800", "U+D800"),
    ("coproc { rm x; }", ""),
    ("select x in a; do y; done", ""),
    ("arr=(a b)", "assignment"),
    ("((x=1))", ""),
    ("then ls", ""),
    ("} ls", ""),
]


UNDERSTOOD: list[tuple[str, list[list[str]]]] = [
    ("git diff HEAD~1 stash@{0} HEAD^{tree} x~ a{b}c {}", [["git", "diff", "HEAD~1", "stash@{0}", "HEAD^{tree}", "x~", "a{b}c", "{}"]]),
    ('grep "foo$" f', [["grep", "foo$", "f"]]),
    ("ls *.py src/*.py a?b [ab]c", [["ls", f"{GLOB}.py", f"src/{GLOB}.py", f"a{GLOB}b", GLOB]]),
    ("ls {a,b} x{1..3} {1..3}", [["ls", GLOB, f"x{GLOB}", NO_OPTION]]),
    ("ls ~ ~/x ~root", [["ls", NO_OPTION, f"{NO_OPTION}/x", NO_OPTION]]),
    ('echo $x "$x" a"$x"b ${x} "${x%.py}" $? "$HOME"', [["echo", SPLIT, ANY_TEXT, f"a{ANY_TEXT}b", SPLIT, ANY_TEXT, NO_OPTION, NO_OPTION]]),
    ("echo $(rm x)", [["echo", SPLIT], ["rm", "x"]]),
    ('echo "$(rm x)"', [["echo", ANY_TEXT], ["rm", "x"]]),
    ('cd "$(git rev-parse --show-toplevel)" && ls', [["cd", NO_OPTION], ["git", "rev-parse", "--show-toplevel"], ["ls"]]),
    ("(rm x)", [["rm", "x"]]),
    ("{ rm x; } > /dev/null", [["rm", "x"]]),
    ("if a; then b; elif c; then d; else e; fi", [["a"], ["b"], ["c"], ["d"], ["e"]]),
    ("while a; do rm x; done", [["a"], ["rm", "x"]]),
    ("until a; do b; done 2>&1 | c", [["a"], ["b"], ["c"]]),
    ('for f in src/*.py; do wc "$f"; done', [["wc", f"src/{ANY_TEXT}.py"]]),
    ("for f in src/*.py; do wc $f; done", [["wc", SPLIT]]),
    ("for i in 1 2; do echo $i; done", [["echo", NO_OPTION]]),
    ('for f in a; do f=-x; wc "$f"; done', [["wc", ANY_TEXT]]),
    ('for f in -x y; do wc "$f"; done', [["wc", ANY_TEXT]]),
    ("! ls", [["ls"]]),
    ('F=a/b.py; wc "$F" $F "x/${F}"', [["wc", "a/b.py", "a/b.py", "x/a/b.py"]]),
    ("F=a && G='b c'\nwc $F $G", [["wc", "a", SPLIT]]),
    ("X=-rf; rm $X", [["rm", "-rf"]]),
    ("F=a; F=b; wc $F", [["wc", SPLIT]]),
    ("F=a; F+=b; wc $F", [["wc", SPLIT]]),
    ("a && F=b; wc $F", [["a"], ["wc", SPLIT]]),
    ("a || F=b; wc $F", [["a"], ["wc", SPLIT]]),
    ("F=b & wc $F", [["wc", SPLIT]]),
    ("F=b | a; wc $F", [["a"], ["wc", SPLIT]]),
    ("(F=b); wc $F", [["wc", SPLIT]]),
    ("if a; then F=b; fi; wc $F", [["a"], ["wc", SPLIT]]),
    ("F=b; read F < x; wc $F", [["read", "F"], ["wc", SPLIT]]),
    ("F=b; FA=c; wc $F", [["wc", "b"]]),
    ("FA=b; read F''A; wc $FA", [["read", "FA"], ["wc", SPLIT]]),
    ("F=b; for i in 1 2; do wc $F; source x; done", [["wc", SPLIT], ["source", "x"]]),
    ("F=b wc $F", [["wc", SPLIT]]),
    ("F=$(a); wc $F", [["a"], ["wc", SPLIT]]),
    ("F=~/a; G='*'; wc $F $G", [["wc", SPLIT, SPLIT]]),
    ('[ -f x ] && [[ $a == b* && -d c ]]', [["[", "-f", "x", "]"], ["[[", ANY_TEXT, "==", f"b{GLOB}", "&&", "-d", "c", "]]"]]),
    ("FOO=1 BAR=$(a b) ls", [["a", "b"], ["ls"]]),
    ("FOO=1 uv run --frozen pytest", [["uv", "run", "--frozen", "pytest"]]),
    ("x=$(pwd); echo $x", [["pwd"], ["echo", SPLIT]]),
    ("export A=1 && ls", [["export", "A=1"], ["ls"]]),
    ("a & b", [["a"], ["b"]]),
    ("a |& b &", [["a"], ["b"]]),
    ("cat <<'E' > /dev/null\nrm x\n$(rm y)\n\\\nE\nls", [["cat"], ["ls"]]),
    ("cat <<E\nrm x\n$(rm y) $z \\$(rm a)\nE", [["cat"], ["rm", "y"]]),
    ("cat <<-E\n\tx\n\tE\nls", [["cat"], ["ls"]]),
    ("git commit -F - <<'E' && ls\nIt's `x` for $y.\nE", [["git", "commit", "-F", "-"], ["ls"]]),
    ("git commit -m \"$(cat <<'E'\nIt's {this}.\nE\n)\"", [["git", "commit", "-m", ANY_TEXT], ["cat"]]),
    ('cat <<< "a $x"', [["cat"]]),
    ("ls \\\n  -la", [["ls", "-la"]]),
    ("while read -r l; do echo \"$l\"; done < f", [["read", "-r", "l"], ["echo", ANY_TEXT]]),
]  # fmt: skip


@pytest.mark.proves("P-05")
@pytest.mark.parametrize(("text", "argvs"), UNDERSTOOD, ids=[repr(text) for text, _ in UNDERSTOOD])
def test_the_parser_finds_commands_in_shell_structures_and_marks_their_unknown_parts(
    text: str, argvs: list[list[str]]
) -> None:
    script = parse_script(text)
    assert script.unclear is None
    assert [list(command.argv) for command in script.commands] == argvs


FOLDERS: list[tuple[str, list[str], tuple[str, ...]]] = [
    ("cd src && ls > out", ["src/out"], ("src",)),
    ("cd src; ls > out", ["out", "src/out"], (".", "src")),
    ("cd src && cd .. && ls > out", ["out"], (".",)),
    ("(cd src && ls) && ls > out", ["out"], (".",)),
    ("cd src | ls > out", ["out"], (".",)),
    ("cd src & ls > out", ["out"], (".",)),
    ("if cd src; then ls; fi; ls > out", ["out", "src/out"], (".", "src")),
    ("cd src && ls > /abs", ["/abs"], ("src",)),
    ('cd "$x" && ls', [], ()),
    ("cd - ; ls", [], ()),
    ("for d in a b; do cd a; ls; done", [], ()),
]


@pytest.mark.proves("P-05")
@pytest.mark.parametrize(("text", "targets", "folders"), FOLDERS, ids=[text for text, _, _ in FOLDERS])
def test_the_parser_follows_a_change_of_the_folder(text: str, targets: list[str], folders: tuple[str, ...]) -> None:
    script = parse_script(text)
    assert script.unclear is None
    assert [file.target for file in script.files] == targets
    assert script.commands[-1].folders == folders


@pytest.mark.proves("P-05")
@pytest.mark.parametrize(("text", "named"), UNCLEAR, ids=[repr(text) for text, _ in UNCLEAR])
def test_any_other_shell_text_is_unclear_and_the_reason_names_the_cause(text: str, named: str) -> None:
    script = parse_script(text)
    assert script.unclear is not None
    assert named in script.unclear


@pytest.mark.proves("P-05")
def test_a_text_with_too_many_commands_is_unclear() -> None:
    assert parse_script("; ".join(["ls"] * MAX_COMMANDS)).unclear is None
    assert "51 commands" in (parse_script("; ".join(["ls"] * (MAX_COMMANDS + 1))).unclear or "")


@pytest.mark.proves("P-05")
def test_an_overlong_text_is_unclear_and_not_parsed() -> None:
    assert "has 2,000,000 characters" in (parse_script("a " * 1_000_000).unclear or "")
    assert parse_script("(" * 30_000).unclear is not None
    assert parse_script('"' + "\\" * 30_000).unclear is not None


def test_the_recognised_commands_of_an_unclear_text_are_kept_for_deny_rules() -> None:
    assert ("rm", "-rf", "$X") in [command.argv for command in parse_script("case x in x) rm -rf $X;; esac").commands]
    assert ("rm", "x") in [command.argv for command in parse_script("echo <(rm x)").commands]


QUOTABLE = st.text(
    st.characters(blacklist_categories=["Cs", "Cc", "Cf", "Co", "Zl", "Zp", "Zs"]) | st.sampled_from(" \n\t"),
    max_size=12,
)


@pytest.mark.proves("P-05")
@given(st.lists(QUOTABLE, min_size=1, max_size=6))
@example(["-9", "", "a b", "'", '"', "$x", "`", "*", "#", "\\"])
@example(["if", "then", "!", "[", "{", "x=1"])
def test_quoted_words_are_parsed_back_unchanged(argv: list[str]) -> None:
    text = " ".join("'" + word.replace("'", "'\"'\"'") + "'" for word in argv)
    script = parse_script(text)
    if "\\\n" in text:
        assert script.unclear is not None
        return
    assert script.unclear is None, script.unclear
    assert [list(command.argv) for command in script.commands] == [argv]


WORDS = st.sampled_from(
    [
        "ls",
        "rm",
        "-9",
        "a\\ b",
        "'q r'",
        '"d q"',
        "$x",
        "$(x)",
        "`x`",
        "*",
        "~",
        "{a,b}",
        "x=1",
        "#c",
        "''",
        "2",
        "é",
        "\\",
    ]
)
JOINTS = st.sampled_from(
    [
        " ",
        "  ",
        "\n",
        ";",
        "&&",
        "||",
        "|",
        "&",
        ">",
        "2>&1",
        ">/dev/null",
        "<",
        "(",
        ")",
        "'",
        '"',
        "",
        "{",
        "!",
        "\t",
        "<<",
    ]
)


@pytest.mark.proves("P-05")
@given(st.lists(st.tuples(WORDS, JOINTS), max_size=8))
@example([("ls", "\n"), ("'q r'", "")])
@example([("\\", ""), ("''", " "), ("$(x)", "'")])
def test_the_parser_and_shlex_find_the_same_words_in_a_plain_text(parts: list[tuple[str, str]]) -> None:
    text = "".join(word + joint for word, joint in parts)
    script = parse_script(text)
    if script.unclear is not None:
        return
    if not script.is_plain:
        return
    lexer = shlex.shlex(text.replace("\n", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    if "#" in text or "2>&1" in text or "/dev/null" in text:
        return
    if script.files:  # the other reader does not tell a file's number or name from a word
        assert all(file.target in list(lexer) or file.target in text for file in script.files)
        return
    # Left out on both sides: the other reader does not tell a separator from the same characters, escaped.
    separators = (";", "&&", "||", "|", ";;")
    words = [word for word in lexer if word not in separators]
    assert words == [word for command in script.commands for word in command.argv if word not in separators]


@given(st.text(max_size=80))
@example("\ud800")
@example("a" * 70_000)
def test_parsing_any_text_never_raises(text: str) -> None:
    script = parse_script(text)
    assert script.unclear is not None or script.commands


DANGEROUS = st.sampled_from(
    [
        "${x@P}",
        "${!x}",
        "$((x))",
        "`x`",
        "<(x)",
        ">(x)",
        "$'x'",
        '$"x"',
        "a=~",
        "> $f",
        "< ~f",
        "> *",
        "<> f",
        "2>&- x",
        "(x)",
        "; $x y",
        "; f() { x; }",
        "; PATH=. x",
        "\r",
        "\0",
        "\u202e",
    ]
)
HARMLESS = st.sampled_from(["ls", "ls -l", "git diff 'a b'", "a && b", "a | b", "a; b", "echo 'it' \"is\"", "ls 2>&1"])


@pytest.mark.proves("P-05")
@given(HARMLESS, DANGEROUS, st.sampled_from(["", " && ls", "; ls", "\nls", " | ls"]))
def test_a_text_with_an_unsupported_construct_is_always_unclear(head: str, construct: str, tail: str) -> None:
    assert parse_script(f"{head} {construct}{tail}").unclear is not None


def test_the_import_of_the_parser_does_not_load_the_grammar() -> None:
    code = (
        "import sys, handrail.policy.call_authorizer, handrail.policy.shell.parser; print('tree_sitter' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_non_ascii_character_never_crashes_the_parsing_process() -> None:
    """The grammar's scanner looks one up in a table with 384 places. Read in another process, which would end."""
    code = (
        "from handrail.policy.shell.parser import parse_script\n"
        "for place in range(0x80, 0x110000, 0x400):\n"
        "    for before in ('{', 'echo {', '{1..', 'cat <<'):\n"
        "        if not 0xD800 <= place < 0xE000:\n"
        "            parse_script(before + chr(place))\n"
        "print('read')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr


def test_non_ascii_words_are_parsed_unchanged() -> None:
    script = parse_script("größe 'naïve 漢字' a𝄞b > Übung.txt && écho=1 x")
    assert script.unclear is None
    assert [command.argv for command in script.commands] == [("größe", "naïve 漢字", "a𝄞b"), ("écho=1", "x")]
    assert [(found.operator, found.target) for found in script.files] == [(">", "Übung.txt")]
    made_out = parse_script('case x in x) größe "$x" > Übung.txt;; esac')
    assert made_out.unclear and made_out.commands[0].argv == ("größe", "$x")
    assert [found.target for found in made_out.files] == ["Übung.txt"]


def test_several_threads_parse_texts_concurrently() -> None:
    """As watchdogs do."""
    texts = [f"git log -{n} | head -{n} > f{n}" for n in range(40)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(parse_script, texts * 5))
    assert found == [parse_script(text) for text in texts] * 5


PIECES = st.sampled_from(
    [
        *("ls", "git", "a", "-x", "--y=z", "a=b", "'a b'", '"c d"', "''", "a'b'\"c\"", "2", "12", "if", "then", "time", "export", "[", "]", "do", "!"),
        *("&&", "||", ";", "|", "&", "2>&1", ">/dev/null", "2>/dev/null", "2>", ">x", "#", "{", "}", "x;", ";y", "a|b", "$x", "~", "*", "\\a", "%1", "in"),
        *("cd", "test", "true", "exit", "declare", "unset", "let", "'$x'", '"`"', "echo", "-", "--", "a:b", "a@b", "+x", ",", ".", "..", "/bin/ls"),
    ]
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=9), st.sampled_from([" ", "  ", ""]))
def test_the_fast_path_parses_plain_words_as_the_grammar_does(pieces: list[str], blank: str) -> None:
    """The regular expression agrees with the grammar or leaves the text to it."""
    text = blank.join(pieces) if blank else " ".join(pieces).replace(" ;", ";")
    plain = parser._list_plain_parts(text)
    if plain is None:
        return
    raw = text.encode()
    root = parser._parse_syntax_tree(raw)
    assert root is not None and parser._find_unsupported_construct(root) is None, text
    assert parser._parts(root, raw) == plain, text


@pytest.mark.parametrize(
    "text", ["ls -la src", "git diff 'a b' && ls \"c\" 2>&1 | head -5; pwd", "make >/dev/null 2>&1 || echo failed"]
)
def test_ordinary_commands_are_parsed_without_the_grammar(text: str) -> None:
    assert parser._list_plain_parts(text) is not None
