"""Collect the sentences of pages, commands, tools and errors, and find faults of style in them.

``python -m tests.prose`` prints every fault and writes the budgets of ``tests/test_prose.py`` anew. A budget only shrinks.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from tests.written_keys import code

ROOT = Path(__file__).parent.parent
BUDGETS = Path(__file__).parent / "prose_budgets.json"
MOST_WORDS = 30
GENERATED = frozenset(
    f"docs/{name}"
    for name in (
        "conformance.md",
        *(
            f"reference/{page}.md"
            for page in ("tools", "cli", "configuration", "results", "events", "records", "protected-names")
        ),
    )
)
"""Pages whose texts come from elsewhere: from the code, or from a generator that has short sentences in tables."""
_WORD = re.compile(r"[A-Za-z][\w'’-]*")
_END = re.compile(r'[.!?][")\]”’]*\s+(?=[A-Z"(“\[`…])')
_SHORT = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|approx|No)\.$")
_CLAUSE = re.compile(r"(What|Who|Whoever|Whose|Where|Whatever|That|Whether|How)\b")
_WORDS = re.compile(
    r"\b(whoever|somebody|nobody|anybody|beside|anew|likewise|goes on|go on|of (?:its|their) own|(?:is|are) no (?!longer)[a-z]+"
    r"|stands|told|as it is|so many)\b",
    re.IGNORECASE,
)
_BEGINS = re.compile(r"[A-Z`{⟦]")
_BEGINS_BADLY = re.compile(r"(It|What|Nobody|There (?:is|are) no)\b", re.IGNORECASE)
_ENDS = re.compile(r"[.}?]\Z")


class Fault(NamedTuple):
    """A fault of one sentence.

    :param kind: ``long``, ``clause``, ``word``, ``begin`` or ``end``
    """

    kind: str
    text: str


def faults(text: str) -> Iterator[Fault]:
    """Yield the faults of a text without markup."""
    for sentence in sentences(text):
        if len(_WORD.findall(sentence)) > MOST_WORDS:
            yield Fault("long", sentence)
        if _CLAUSE.match(sentence) and not sentence.rstrip('")').endswith("?"):
            yield Fault("clause", sentence)
        yield from (Fault("word", f"{match[0]}: {sentence}") for match in _WORDS.finditer(sentence))


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of at least four words."""
    start = 0
    for match in _END.finditer(text):
        if not _SHORT.search(text[start : match.start() + 1]):
            yield from _long_enough(text[start : match.end()])
            start = match.end()
    yield from _long_enough(text[start:])


def _long_enough(text: str) -> Iterator[str]:
    if len(_WORD.findall(text)) >= 4:
        yield text.strip()


# Markdown.


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a page: no code, tables, headings or links."""
    text = re.sub(r"\A---\n.*?\n---\n|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^([ \t]*)(```+|~~~+).*?^\1?\s*\2\s*$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|<[^>\n]+>", "", text)
    text = re.sub(r"\[([^\]]+)\](\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"`[^`\n]*`", "Code", text)
    gathered: list[str] = []
    for line in [*text.split("\n"), ""]:
        stripped = line.strip()
        item = re.match(r"([-*+•]|\d+[.)])\s+", stripped)
        ends = not stripped or stripped.startswith(("|", "#", "!!!", "???", ":::", "{%")) or item is not None
        if ends and gathered:
            yield re.sub(r"[*_]{1,3}(\S.*?\S|\S)[*_]{1,3}", r"\1", " ".join(gathered))
            gathered = []
        if item is not None:
            gathered.append(stripped[item.end() :])
        elif not ends:
            gathered.append(stripped.lstrip("> "))


def pages() -> dict[str, str]:
    """Return the hand-written pages by path."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = {path.relative_to(ROOT).as_posix(): path for path in found}
    return {
        name: path.read_text(encoding="utf-8")
        for name, path in names.items()
        if name not in GENERATED and not name.startswith("docs/reference/api/")
    }


# The command line and the tools.


def command_texts() -> Iterator[str]:
    """Yield the help of each command and option."""
    from tests.cli_reference import commands, options

    for _, command, _ in commands():
        yield from (" ".join(block.split()) for block in (command.help or "").split("\n\n") if "\b" not in block)
        yield from (option.help or "" for option in options(command))


def tool_texts() -> Iterator[str]:
    """Yield the description and guidance of each shipped tool, and the descriptions of its parameters."""
    from tests.tool_reference import shipped

    for entry in shipped().entries.values():
        yield entry.spec.description
        yield entry.spec.guidance or ""
        yield from _described(entry.spec.parameters)


def _described(schema: object) -> Iterator[str]:
    if isinstance(schema, Mapping):
        for key, value in cast("Mapping[str, Any]", schema).items():
            if key == "description" and isinstance(value, str):
                yield value
            else:
                yield from _described(value)


# Errors.


def errors() -> Iterator[str]:
    """Yield each literal error text, with ``{}`` for an interpolation."""
    names = error_classes()
    for module, node in code().every_call:
        if not module.startswith(("frontends/cli/", "testing/")) and _makes_error(node, names):
            texts = (text for argument in node.args for text in _literals(argument))
            if (text := next((one for one in texts if " " in one), None)) is not None:
                yield text


def error_classes() -> frozenset[str]:
    """Return the names of the exceptions of the package that carry a text to a model, an operator or a programmer."""
    bases = {node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases} for node in code().every_class}
    found = {"HandrailError", "CallRejection"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return frozenset(found)


def _makes_error(node: ast.Call, names: Iterable[str]) -> bool:
    name = ast.unparse(node.func)
    return name == "Result.error" or name.rpartition(".")[2] in names


def _literals(node: ast.expr) -> Iterator[str]:
    """Yield the texts that an expression can be."""
    match node:
        case ast.Constant(value=str() as text):
            yield text
        case ast.JoinedStr():
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        case ast.BinOp(op=ast.Add()):
            left, right = next(_literals(node.left), "{}"), next(_literals(node.right), "{}")
            yield left + right
        case ast.IfExp():
            yield from _literals(node.body)
            yield from _literals(node.orelse)
        case _:
            return


def error_faults(text: str) -> Iterator[Fault]:
    """Yield the faults of one error text."""
    if not _BEGINS.match(text) or _BEGINS_BADLY.match(text):
        yield Fault("begin", text)
    if not _ENDS.search(text):
        yield Fault("end", text)
    yield from faults(text)


# Budgets.


def measured() -> dict[str, list[Fault]]:
    """Return the faults of each page, and of the three kinds of texts in the code."""
    found = {name: [fault for part in paragraphs(text) for fault in faults(part)] for name, text in pages().items()}
    found["command line"] = [fault for text in command_texts() for fault in faults(text)]
    found["tools"] = [fault for text in tool_texts() for fault in faults(text)]
    found["errors"] = [fault for text in errors() for fault in error_faults(text)]
    return found


def counts(found: Iterable[Fault]) -> dict[str, int]:
    """Return the number of faults of each kind."""
    kinds = [fault.kind for fault in found]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def budgets() -> dict[str, dict[str, int]]:
    """Return the number of faults of each kind that a text may have."""
    return json.loads(BUDGETS.read_text(encoding="utf-8"))


def main() -> int:
    """Print the faults and write the budgets anew."""
    every = measured()
    for name, found in every.items():
        for fault in found:
            print(f"{name}: {fault.kind}: {' '.join(fault.text.split())}")
    left = {name: counts(found) for name, found in every.items() if found}
    BUDGETS.write_text(json.dumps(left, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
