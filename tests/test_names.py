"""Names of classes and modules use the terms of the field.

``names.toml`` has the exceptions. Each list only shrinks: a test fails for an entry that is not needed any more.
"""

from __future__ import annotations

import ast
import builtins
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.written_keys import SOURCE, code

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

LISTS = {
    key: frozenset(text.split())
    for key, text in tomllib.loads(Path(__file__).with_name("names.toml").read_text()).items()
}
"""Words and exceptions, each with its meaning in the file."""
MOST_OF_ONE_WORD = 0.2


def words(name: str) -> list[str]:
    """Return the words of a name, in lower case."""
    return [word.lower() for word in _WORD.findall(name)]


def is_odd(word: str) -> bool:
    """Return whether a word is a participle, a gerund or an adverb."""
    if word in LISTS["irregular"] or word in LISTS["adverbs"]:
        return True
    return len(word) > 4 and word not in LISTS["nouns"] and word.endswith(("ed", "ing", "ly"))


@cache
def classes() -> list[str]:
    """Return the name of each class of the package, without a leading underscore."""
    return [node.name.lstrip("_") for node in code().every_class]


def modules() -> Iterator[Path]:
    """Yield each module with its own file name."""
    yield from (path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if not path.stem.startswith("__"))


def compare(found: Iterable[str], allowed: frozenset[str]) -> None:
    """Fail for a name that is not allowed, and for an allowed one that is not there."""
    names = set(found)
    assert not names - allowed, f"choose another name: {', '.join(sorted(names - allowed))}"
    assert not allowed - names, f"take these out of the list: {', '.join(sorted(allowed - names))}"


def test_a_class_name_has_two_words_or_is_listed() -> None:
    compare((name for name in classes() if len(words(name)) == 1), LISTS["one_word"])
    assert len(LISTS["one_word"]) <= MOST_OF_ONE_WORD * len(classes())


def test_every_class_name_ends_with_a_noun() -> None:
    compare((name for name in classes() if is_odd(words(name)[-1])), LISTS["heads"])


def test_every_module_name_ends_with_a_noun() -> None:
    compare((path.stem for path in modules() if is_odd(words(path.stem)[-1])), LISTS["modules"])


def test_each_class_name_is_unique_or_listed() -> None:
    compare((name for name, count in Counter(classes()).items() if count > 1), LISTS["twice"])


def test_each_file_name_is_unique_within_its_package_or_listed() -> None:
    counts = Counter(f"{path.parts[0]}/{path.name}" for path in modules())
    compare((name for name, count in counts.items() if count > 1), LISTS["files_twice"])


_REFERENCE = re.compile(r":(?:meth|attr|class|func|data|exc):`(?:[^`<]*<)?~?([\w.]+)>?`")


def definitions(tree: ast.AST) -> set[str]:
    """Return every name that a file defines or imports."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                found.add(name)
            case ast.alias(name=name, asname=alias):
                found.update((alias or name).split("."))
            case _:
                pass
    return found


def test_every_reference_in_a_docstring_names_an_existing_object() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    defined = {path: definitions(tree) for path, tree in trees.items()}
    anywhere = set[str]().union(*defined.values())
    lost: list[str] = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Expr) or not isinstance(text := getattr(node.value, "value", None), str):
                continue
            for reference in _REFERENCE.findall(text):
                first, _, rest = reference.partition(".")
                if first == "handrail" or first[0].isupper():
                    is_known = set(reference.split(".")) - {"handrail"} <= anywhere | {
                        part for other in trees for part in other.with_suffix("").parts
                    }
                else:
                    is_known = bool(rest) or first in defined[path]
                if not is_known:
                    lost.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {reference}")
    assert not lost, "\n".join(lost)


def _stale_docstring_names(tree: ast.Module, classes_there: frozenset[str]) -> Iterator[str]:
    """Yield each parameter and exception of a docstring that does not exist."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node) or ""
        there = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        if node.args.kwarg is None:
            yield from (f"{node.name}: {name}" for name in re.findall(r":param (\w+):", text) if name not in there)
        raised = re.findall(r":raises (\w+):", text)
        yield from (f"{node.name}: {name}" for name in raised if name not in classes_there)


def test_docstrings_name_parameters_and_exceptions_that_exist() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    own = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for path, tree in trees.items():
        imported = {
            (name.asname or name.name).rpartition(".")[2]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names
        }
        assert not [*_stale_docstring_names(tree, frozenset({*dir(builtins), *own, *imported}))], path
