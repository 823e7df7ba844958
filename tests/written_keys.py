"""The keys that the code writes into metadata, records and events, read from its syntax tree.

An expression is followed through the names, functions and properties that it uses, as far as it is a table with literal keys.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import cast

SOURCE = Path(__file__).parent.parent / "src" / "handrail"
_FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef
_PASSING = frozenset({"dict", "asdict", "value", "record"})
"""Functions that return the table of their argument: a copy, or one with secrets removed."""
_TABLES = frozenset({"metadata", "more", "counts", "known", "kept"})
"""Names of local tables that become metadata, where outputs are shaped."""
_OUTPUT = "arbiter/output/"
_MAKING = ("arbiter/", "ipc/")
"""Rooms that make results."""
_FEW = 3
"""How many functions may have a name that is followed; a commoner name would lead anywhere."""
_ENVELOPE = frozenset({"data", "error_text", "type"})
_METADATA_PARAMETERS = frozenset({"metadata", "details"})


class Code:
    """The syntax of all modules, with an index of functions by name."""

    def __init__(self, source: Path = SOURCE) -> None:
        paths = sorted(source.rglob("*.py"))
        self.modules = {
            path.relative_to(source).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths
        }
        self.functions: defaultdict[str, list[_FunctionDef]] = defaultdict(list)
        self.every_call: list[tuple[str, ast.Call]] = []
        self.every_class: list[ast.ClassDef] = []
        self.calls: defaultdict[str, list[ast.Call]] = defaultdict(list)
        self.owner: dict[ast.AST, _FunctionDef] = {}
        self.assigned: defaultdict[str, list[tuple[ast.expr, ast.expr, str]]] = defaultdict(list)
        """Target, value and module of the assignments to a name or its members, by the name."""
        self.returned: defaultdict[_FunctionDef, list[ast.expr]] = defaultdict(list)
        self.classes: dict[_FunctionDef, str] = {}
        for module, tree in self.modules.items():
            self._read(tree, None, module)

    def _read(self, node: ast.AST, function: _FunctionDef | None, module: str) -> None:
        if isinstance(node, ast.ClassDef):
            self.every_class.append(node)
            self.classes |= {one: node.name for one in node.body if isinstance(one, _FunctionDef)}
        elif isinstance(node, _FunctionDef):
            self.functions[node.name].append(node)
            function = node
        elif isinstance(node, ast.Call):
            self.calls[_called(node)].append(node)
            self.every_call.append((module, node))
        elif isinstance(node, ast.Return) and node.value is not None and function is not None:
            self.returned[function].append(node.value)
        for target, value in _assignments(node):
            table = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(table, ast.Name):
                self.assigned[table.id].append((target, value, module))
        for inner in ast.iter_child_nodes(node):
            if function is not None:
                self.owner[inner] = function
            self._read(inner, function, module)

    def keys(self, node: ast.expr, depth: int = 0) -> set[str]:
        """Return the keys of a table that an expression makes."""
        if depth > 8:
            return set()
        match node:
            case ast.Dict():
                own = {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
                spread = (value for key, value in zip(node.keys, node.values, strict=True) if key is None)
                return own.union(*(self.keys(value, depth + 1) for value in spread))
            case ast.DictComp(key=ast.Name(), generators=[ast.comprehension(iter=ast.Tuple() as names)]):
                return set(_constants(names))
            case ast.IfExp():
                return self.keys(node.body, depth + 1) | self.keys(node.orelse, depth + 1)
            case ast.BinOp(op=ast.BitOr()):
                return self.keys(node.left, depth + 1) | self.keys(node.right, depth + 1)
            case ast.BoolOp():
                return set[str]().union(*(self.keys(value, depth + 1) for value in node.values))
            case ast.NamedExpr():
                return self.keys(node.value, depth + 1)
            case ast.Name():
                return self._local(node, depth)
            case ast.Attribute():
                return self._returned(node.attr, depth, properties=True)
            case ast.Call() if _called(node) in _PASSING and node.args:
                return self.keys(node.args[0], depth + 1)
            case ast.Call():
                return self._returned(_called(node), depth)
            case _:
                return set()

    def _local(self, name: ast.Name, depth: int) -> set[str]:
        function, found = self.owner.get(name), set[str]()
        for target, value, _ in self.assigned.get(name.id, ()):
            if self.owner.get(target) is function is not None:
                found |= (
                    self.keys(value, depth + 1)
                    if isinstance(target, ast.Name)
                    else _texts(cast("ast.Subscript", target).slice)
                )
        return found

    def _returned(self, name: str, depth: int, *, properties: bool = False) -> set[str]:
        functions = self.functions.get(name, [])
        if properties:
            functions = [
                one for one in functions if any(ast.unparse(mark) == "property" for mark in one.decorator_list)
            ]
        if len(functions) > _FEW:
            return set()
        values = (value for one in functions for value in self.returned.get(one, ()))
        return set[str]().union(*(self.keys(value, depth + 1) for value in values))


@cache
def code() -> Code:
    """Return the syntax of the package."""
    return Code()


def metadata_keys() -> set[str]:
    """Return the keys of a result's metadata that the kernel and the shipped tools can set."""
    found: set[str] = set()
    for name, functions in code().functions.items():
        for function in functions:
            if _takes_metadata(function):
                own = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
                for call in _calls_of(function, name):
                    found |= {key.arg for key in call.keywords if key.arg is not None and key.arg not in own}
                    found |= set[str]().union(*(code().keys(key.value) for key in call.keywords if key.arg is None))
    for name in _TABLES:
        for target, value, module in code().assigned.get(name, ()):
            if module.startswith(_OUTPUT if name != "metadata" else _MAKING):
                if isinstance(target, ast.Subscript):
                    found |= _texts(target.slice)
                elif not isinstance(value, ast.Name | ast.Attribute | ast.Call):
                    found |= code().keys(value)
    return found - _ENVELOPE


def _takes_metadata(function: _FunctionDef) -> bool:
    kwarg = function.args.kwarg
    return kwarg is not None and (kwarg.arg in _METADATA_PARAMETERS or function.name == "with_metadata")


def _calls_of(function: _FunctionDef, name: str) -> Iterable[ast.Call]:
    """Return the calls of a function: of a constructor those of its class, of a static method those that name the class."""
    owner = code().classes.get(function, "")
    if name == "__init__":
        return code().calls[owner]
    static = any(ast.unparse(mark) == "staticmethod" for mark in function.decorator_list)
    return [one for one in code().calls[name] if not static or ast.unparse(one.func) == f"{owner}.{name}"]


def record_keys(kind: str) -> set[str]:
    """Return the keys of the bodies of a kind of record."""
    return _sent(("queue_log_record", 0, 1), kind) | _sent(("Record", 0, 3), kind)


def event_keys(kind: str) -> set[str]:
    """Return the keys of the data of a kind of event."""
    return _sent(("emit", 0, 1), kind)


def _sent(call: tuple[str, int, int], kind: str) -> set[str]:
    name, at_kind, at_table = call
    found: set[str] = set()
    for node in code().calls[name]:
        if len(node.args) > at_table and kind in _constants(node.args[at_kind]):
            found |= code().keys(node.args[at_table])
    return found


def _constants(node: ast.expr) -> Iterable[str]:
    return [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def _called(node: ast.Call) -> str:
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AugAssign):
        yield node.target, ast.Dict([None], [node.value])
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield node.target, node.value


def _texts(node: ast.expr) -> set[str]:
    """Return the texts that a subscript can be: a literal, or a literal after a parameter ``prefix``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Name) and isinstance(node.right, ast.Constant):
        return {f"{prefix}{node.right.value}" for prefix in ("output_", "error_")}
    if isinstance(node, ast.Name) and node.id.isupper():
        return {value for name, value in _literals().items() if name == node.id}
    return set()


@cache
def _literals() -> dict[str, str]:
    """Return the texts of module-level names in capitals."""
    found: dict[str, str] = {}
    for tree in code().modules.values():
        for node in tree.body:
            for target, value in _assignments(node):
                if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found[target.id] = value.value
    return found
