"""Adaptation of a tool's parameters to the schema language of one provider, without losing any of them.

If the provider's language lacks a constraint, the schema becomes looser and the description states the constraint in words. An
adapted schema accepts every call that the tool's own schema accepts, and the kernel checks each call against the tool's own.
Properties keep their places and their nesting. If a provider refuses the name of a property, the property gets another name,
and :meth:`AdaptedSchema.restore_property_names` restores the original.

A reference remains if the provider follows it. Otherwise it is inlined. That can turn a schema of a kilobyte into one of
hundreds, which every request would pay for. So references are inlined only to a proportionate number of levels.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, cast
from urllib.parse import unquote

from handrail.catalog.provider_dialects import ANNOTATIONS, ProviderSchemaDialect
from handrail.contract.struct import Struct, field

# Merging and splitting of schemas: the conjunction of two, the union of several.
#
# The result is never narrower than the input. If one schema cannot express it exactly, the result is looser.

_MAX_DESCRIBED = 240
_BUNDLES = (
    ("if", "then", "else"),
    ("contains", "minContains", "maxContains"),
    ("minimum", "exclusiveMinimum"),
    ("maximum", "exclusiveMaximum"),
    ("items", "prefixItems", "additionalItems"),
)
"""Groups of keywords that change each other's meaning, so that those of two schemas are never mixed."""
_APART = ("anyOf", "oneOf", "not", "if", "dependentSchemas")
"""Keywords that name properties. If two schemas both have one of them, the second one's stays a separate schema."""
_KEYWORD_TYPES = {
    **dict.fromkeys(
        ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties"),
        "object",
    ),
    **dict.fromkeys(
        ("maxProperties", "dependentRequired", "dependentSchemas", "unevaluatedProperties", "propertyOrdering"),
        "object",
    ),
    **dict.fromkeys(
        ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains"), "array"
    ),
    **dict.fromkeys(("maxContains", "unevaluatedItems", "additionalItems"), "array"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format", "contentEncoding", "contentMediaType"), "string"),
}
_WIDER = {"integer": "number"}


SchemaNode = Mapping[str, Any]


def approximate_schema_intersection(one: SchemaNode, other: SchemaNode) -> dict[str, Any]:
    """Merge two schemas into one that requires what both require, or less.

    If both have a keyword, the first one's stays, so the result is never narrower than both together.
    """
    both = dict(one)
    for keyword, value in other.items():
        bundle = _bundle(keyword)
        if not any(of in one for of in bundle):
            both[keyword] = value
        elif keyword == "properties":
            both[keyword] = _merge_properties(one[keyword], value)
        elif keyword == "required":
            both[keyword] = list(dict.fromkeys([*both[keyword], *value]))
        elif keyword == "allOf":
            both[keyword] = [*both[keyword], *value]
        elif keyword == "description":
            both[keyword] = f"{both[keyword]} {value}"
    if apart := _clashing_keywords(one, other):
        both["allOf"] = [*both.get("allOf", ()), apart]
    _merge_further_properties(both, (one, other))
    return both


def _merge_further_properties(both: dict[str, Any], parts: Sequence[SchemaNode]) -> None:
    """Let the merged schema allow further properties as far as each part does."""
    if any("patternProperties" in part for part in parts):
        for keyword in ("additionalProperties", "unevaluatedProperties"):
            both.pop(keyword, None)
    elif closed := [part for part in parts if part.get("additionalProperties") is False]:
        # each closes what it names itself
        names = set(both.get("properties", ())).intersection(*(part.get("properties", ()) for part in closed))
        both["properties"] = {name: schema for name, schema in both.get("properties", {}).items() if name in names}


def _merge_properties(one: SchemaNode, other: SchemaNode) -> dict[str, Any]:
    both = {**other, **one}
    for name in other.keys() & one.keys():
        if other[name] != one[name]:
            both[name] = {"allOf": [one[name], other[name]]}
    return both


def _bundle(keyword: str) -> tuple[str, ...]:
    return next((keywords for keywords in _BUNDLES if keyword in keywords), (keyword,))


def _clashing_keywords(one: SchemaNode, other: SchemaNode) -> dict[str, Any]:
    """Return the alternatives and conditions of ``other`` that clash with those of ``one``."""
    clashing = (of for of in _APART if of in one and of in other and one[of] != other[of])
    return {keyword: other[keyword] for of in clashing for keyword in _bundle(of) if keyword in other}


def merge_root_alternatives(root: dict[str, Any], branches: Sequence[SchemaNode]) -> dict[str, Any]:
    """Return a root that accepts what any of its alternatives accepts."""
    properties: dict[str, list[Any]] = {}
    for part in branches:
        for name, schema in part.get("properties", {}).items():
            forms = properties.setdefault(name, [])
            if schema not in forms:
                forms.append(schema)
    if (
        root.get("additionalProperties", False) is not False
    ):  # an alternative that does not name the property allows any value
        for name, forms in properties.items():
            if {} not in forms and any(name not in part.get("properties", {}) for part in branches):
                forms.append({})
    own: SchemaNode = root.get("properties", {})
    flat = dict(root)
    flat["properties"] = {
        **own,
        **{
            name: forms[0] if len(forms) == 1 else {"anyOf": forms}
            for name, forms in properties.items()
            if name not in own
        },
    }
    common = set[str].intersection(*(set(part.get("required", ())) for part in branches))
    required = list(dict.fromkeys([*root.get("required", ()), *sorted(common)]))
    if required:
        flat["required"] = required
    return flat


def describe_property_alternatives(keyword: str, branches: Sequence[SchemaNode]) -> str:
    """Describe as a sentence which properties belong together."""
    groups = [
        " and ".join(map(str, part.get("required", ()))) or " or ".join(part.get("properties", ())) for part in branches
    ]
    groups = [group for group in dict.fromkeys(groups) if group]
    how = "exactly one" if keyword == "oneOf" else "at least one"
    return f"Give {how} of: {'; '.join(groups)}." if groups else describe_schema_keyword(keyword, list(branches))


def split_types_into_alternatives(node: dict[str, Any], types: Sequence[str]) -> dict[str, Any]:
    """Turn a list of types into alternatives, each with the constraints on its type."""
    rest = {key: value for key, value in node.items() if key != "type"}
    if "anyOf" in rest and len(types) > 1:
        return rest  # a schema cannot have two lists of alternatives
    values = rest.pop("enum", None)
    shown = {key: rest.pop(key) for key in tuple(rest) if key in ANNOTATIONS and key != "format"}
    branches: list[dict[str, Any]] = []
    for name in types:
        if (branch := _branch_of_type(name, rest, values)) is not None:
            branches.append(branch)
    return {**shown, **branches[0]} if len(branches) == 1 else {**shown, "anyOf": branches} if branches else shown


def move_constraints_into_branches(node: dict[str, Any]) -> dict[str, Any]:
    """Move the constraints next to a list of alternatives into each alternative."""
    shown = {key: value for key, value in node.items() if key in ANNOTATIONS and key != "format"}
    beside = {key: value for key, value in node.items() if key != "anyOf" and key not in shown}
    if beside:
        given = cast("list[SchemaNode | bool]", node["anyOf"])
        node["anyOf"] = [
            branch if isinstance(branch, bool) else approximate_schema_intersection(branch, beside) for branch in given
        ]
    return {**shown, "anyOf": node["anyOf"]}


def _branch_of_type(name: str, asked: SchemaNode, values: Sequence[Any] | None) -> dict[str, Any] | None:
    """Return the part of ``asked`` for one type; None if none of the ``values`` has this type."""
    kinds = (name, _WIDER.get(name))
    branch = {"type": name, **{key: value for key, value in asked.items() if _KEYWORD_TYPES.get(key, name) in kinds}}
    if values is None:
        return branch
    fits = [value for value in values if json_type(value) in kinds]
    if fits and name in ("string", "number", "integer"):
        branch["enum"] = fits
    return branch if fits else None


def _simplify_keywords(node: dict[str, Any]) -> None:
    """Replace keywords by fewer ones with the same meaning."""
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if isinstance(node.get("items"), list):  # as drafts before 2020-12 wrote it
        node["prefixItems"] = node.pop("items")
        if "additionalItems" in node:
            node["items"] = node.pop("additionalItems")
    if "oneOf" in node and "anyOf" not in node:
        node["anyOf"] = node.pop("oneOf")


def _type_by_enum(node: dict[str, Any], words: list[str]) -> None:
    """Set the types of an enum with values other than text and numbers.

    :param words: collects what types cannot express, in words
    """
    if all(isinstance(value, str) or is_json_number(value) for value in node["enum"]):
        return
    kinds = list(dict.fromkeys(map(json_type, node["enum"])))
    if not {"null", "string", "number"}.issuperset(kinds):
        words.append(describe_schema_keyword("enum", node["enum"]))
    node.setdefault("type", kinds)
    if not isinstance(node["type"], list):
        node["type"] = [node["type"]]


def strip_property_descriptions(value: object) -> Any:
    """Return a schema without descriptions of its properties, for use in a place that repeats them."""
    if isinstance(value, list):
        return [strip_property_descriptions(one) for one in cast("list[object]", value)]
    if not isinstance(value, Mapping):
        return value
    node = cast("SchemaNode", value)
    return {
        key: strip_property_descriptions(one)
        for key, one in node.items()
        if key not in ANNOTATIONS or not isinstance(one, str)
    }


def json_type(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def is_json_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def describe_schema_keyword(keyword: str, value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
    return f"({keyword}: {text if len(text) <= _MAX_DESCRIBED else text[:_MAX_DESCRIBED] + '…'})"


# Walks through a schema: its subschemas, and the targets of its references.

SCHEMAS_IN = (
    "items",
    "additionalProperties",
    "contains",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
)
LISTS_IN = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS_IN = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
LOCAL = re.compile(r"#/(?:\$defs|definitions)/[^/]+\Z")
"""A reference to a definition of the whole schema."""


def list_property_names(node: SchemaNode) -> Iterable[str]:
    properties: Any = node.get("properties")
    return cast("Mapping[str, Any]", properties) if isinstance(properties, Mapping) else ()


def collect_schema_references(node: SchemaNode) -> tuple[str, ...]:
    """Return the references that ``node`` consists of, directly or by ``allOf``."""
    reference = node.get("$ref")
    own = (reference,) if isinstance(reference, str) else ()
    parts = cast("list[SchemaNode | bool]", node.get("allOf", ()))
    return (*own, *(one for part in parts if not isinstance(part, bool) for one in collect_schema_references(part)))


def iterate_schema_references(root: SchemaNode) -> Iterator[str]:
    for node in iterate_schemas(root):
        for keyword in ("$ref", "$dynamicRef"):
            if isinstance(node.get(keyword), str):
                yield node[keyword]


def iterate_schemas(root: SchemaNode) -> Iterator[SchemaNode]:
    """Yield every schema within a schema, itself first."""
    rest: list[object] = [root]
    while rest:
        one = rest.pop()
        if not isinstance(one, Mapping):
            continue
        node = cast("SchemaNode", one)
        yield node
        rest += [node.get(keyword) for keyword in SCHEMAS_IN]
        for keyword in LISTS_IN:
            rest += node.get(keyword) or ()
        for keyword in _MAPS_IN:
            inner: Any = node.get(keyword)
            if isinstance(inner, Mapping):
                rest += cast("Mapping[str, Any]", inner).values()


def resolve_schema_reference(root: SchemaNode, reference: str) -> object:
    """Return the target of a reference by path or anchor; None if it has no target here."""
    if not reference.startswith("#"):
        return None
    if (fragment := unquote(reference[1:])) and not fragment.startswith("/"):
        anchored = (one for one in iterate_schemas(root) if fragment in (one.get("$anchor"), one.get("$dynamicAnchor")))
        return next(anchored, None)
    found: Any = root
    for part in fragment.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = cast("Mapping[str, Any]", found)[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(cast("list[Any]", found)):
            found = cast("list[Any]", found)[int(key)]
        else:
            return None
    return found


MAX_GROWTH = 4
"""The maximum length of an adapted schema, as a multiple of the tool's own."""
ALWAYS_ALLOWED = 4_000
"""The characters that an adapted schema may always have, however short the tool's own is."""
MAX_UNROLLED = 2
"""The maximum number of times that a recursive definition is inlined in itself."""
MAX_SCHEMAS = 5_000
"""The maximum number of schemas to write in one attempt, and in all attempts before the last one."""
_AT_ROOT = (
    "oneOf",
    "anyOf",
    "allOf",
    "not",
    "if",
    "then",
    "else",
    "enum",
    "const",
    "dependentSchemas",
    "$ref",
    "$dynamicRef",
)
_SAID_AT_ROOT = ("not", "if", "then", "else", "enum", "const", "dependentSchemas", "$dynamicRef")
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
"""Keywords that refuse more if a schema next to them names less."""
_OMITTED_KEYWORDS = frozenset(
    {"$schema", "$id", "$anchor", "$dynamicAnchor", "$vocabulary", "$comment", "$defs", "definitions"}
)

_FORMATS = frozenset({"date-time", "date", "time", "duration", "int32", "int64", "float", "double"})
_INVERTING_KEYWORDS = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    *_UNEVALUATED,
    "$dynamicRef",  # its target depends on the context
)


class AdaptedSchema(Struct, frozen=True):
    """Parameters in a provider's dialect.

    :param notes: what the parameters cannot express, to be added to the tool's description
    :param renamed: the original property names, by the names in requests
    """

    parameters: SchemaNode
    notes: tuple[str, ...] = ()
    renamed: SchemaNode = field(default_factory=dict[str, str])

    def restore_property_names(self, arguments: object) -> Any:
        """Return a model's arguments with the tool's own property names."""
        if not self.renamed:
            return arguments
        if isinstance(arguments, Mapping):
            given = cast("Mapping[str, Any]", arguments)
            return {self.renamed.get(name, name): self.restore_property_names(value) for name, value in given.items()}
        return (
            [self.restore_property_names(item) for item in cast("list[Any]", arguments)]
            if isinstance(arguments, list)
            else arguments
        )


def adapt_tool(view: SchemaNode, dialect: ProviderSchemaDialect) -> tuple[dict[str, Any], AdaptedSchema]:
    """Return a tool's LLM view in a provider's form, and how to restore its arguments."""
    fitted, description = _adapt_schema_and_text(view, dialect)
    return dialect.form(str(view["name"]), description, fitted.parameters), fitted


def adapt_tool_view(view: SchemaNode, dialect: ProviderSchemaDialect) -> dict[str, Any]:
    """Return a tool's LLM view with the description and parameters that a provider gets."""
    fitted, description = _adapt_schema_and_text(view, dialect)
    return {**view, "description": description, "parameters": fitted.parameters}


def _adapt_schema_and_text(view: SchemaNode, dialect: ProviderSchemaDialect) -> tuple[AdaptedSchema, str]:
    fitted = _adapt_cached(json.dumps(view["parameters"], sort_keys=False), dialect)
    return fitted, append_notes_and_truncate(str(view["description"]), fitted.notes, dialect.max_description)


def find_schemas_with_renamed_properties(
    views: Iterable[SchemaNode], dialect: ProviderSchemaDialect
) -> dict[str, AdaptedSchema]:
    """Return the tools with renamed properties, by wire name."""
    if dialect.property_names is None:
        return {}
    fitted = ((str(view["name"]), adapt_tool(view, dialect)[1]) for view in views)
    return {name: one for name, one in fitted if one.renamed}


def append_notes_and_truncate(description: str, notes: Sequence[str], most: int | None) -> str:
    """Return a description followed by ``notes``, cut at the end of a sentence if it is too long.

    :param most: the maximum characters, or None
    """
    whole = " ".join([description, *notes])
    if most is None or len(whole) <= most:
        return whole
    tail = " … (use info for the rest)"
    head = whole[: most - len(tail)]
    ends = [match.end() for match in re.finditer(r"[.!?](?=\s)", head)]
    return (head[: ends[-1]] if ends and ends[-1] > most // 2 else head.rstrip()) + tail


@lru_cache(maxsize=4096)
def _adapt_cached(parameters: str, dialect: ProviderSchemaDialect) -> AdaptedSchema:
    return adapt_schema(json.loads(parameters), dialect)


def adapt_schema(parameters: SchemaNode, dialect: ProviderSchemaDialect) -> AdaptedSchema:
    """Adapt ``parameters``, a valid schema of an object, to ``dialect``."""
    if (
        dialect.keywords is None
        and dialect.property_names is None
        and not (dialect.plain_root and _has_root_alternatives(parameters))
    ):
        return AdaptedSchema(parameters)
    most = max(MAX_GROWTH * compute_schema_request_length(parameters), ALWAYS_ALLOWED)
    nodes = min(most // 2, MAX_SCHEMAS)  # a schema has two characters at least
    written = 0
    found: AdaptedSchema | None = None
    for levels in count():
        tried = _SchemaAdapter(parameters, dialect, levels, nodes)
        try:
            fitted = tried.adapt()
        except _SchemaTooLarge:
            break
        if compute_schema_request_length(fitted.parameters) > most:
            break
        found = fitted
        written += tried.nodes
        if not tried.goes_deeper or written > MAX_SCHEMAS:
            break
    while found is None:  # too large even without inlined references: leave the end of it open
        fitted = _SchemaAdapter(parameters, dialect, 0, nodes, cut=True).adapt()
        if not nodes or compute_schema_request_length(fitted.parameters) <= most:
            found = fitted
        nodes //= 2
    return found


def compute_schema_request_length(schema: SchemaNode) -> int:
    """Return the characters of a schema in a request."""
    return len(json.dumps(schema, ensure_ascii=False))


class _SchemaTooLarge(Exception):
    """The adapted schema would exceed its maximum size."""


def _has_root_alternatives(root: SchemaNode) -> bool:
    return any(keyword in root for keyword in _AT_ROOT)


ReferenceTrail = tuple[tuple[str, ...], ...]
"""The references that led to a schema, those of each level together."""


class _SchemaAdapter:
    """One attempt to adapt a schema.

    :param levels: the number of levels to which references are inlined
    :param most: the maximum number of schemas to write
    :param cut: leave everything beyond ``most`` open instead of raising :class:`_SchemaTooLarge`
    """

    def __init__(
        self, root: SchemaNode, dialect: ProviderSchemaDialect, levels: int, most: int, *, cut: bool = False
    ) -> None:
        self.root = root
        self.dialect = dialect
        self.levels, self.most, self.cut = levels, most, cut
        self.nodes = 0
        self.goes_deeper = False
        """Whether a reference was not inlined because of ``levels``."""
        self.notes: list[str] = []
        self.names = _rename_refused_properties(root, dialect)
        references = list(iterate_schema_references(root))
        # A reference names a place in the original schema. Only references to definitions stay valid.
        self.defines = dialect.keywords is None and any(map(LOCAL.match, references))
        self.loosens = (
            dialect.keywords is not None or bool(self.names) or any(not LOCAL.match(one) for one in references)
        )

    def adapt(self) -> AdaptedSchema:
        root = self.root
        if self.dialect.plain_root and _has_root_alternatives(root):
            root = self._flatten_root(root)
        fitted = self._node(root, ())
        fitted = {"type": "object", **fitted, "properties": fitted.get("properties", {})}
        for key in ("$defs", "definitions"):
            held = cast("SchemaNode", self.root.get(key, {}))
            if held and not self.loosens:
                fitted[key] = held
            elif held and self.defines:
                fitted[key] = {name: self._node(one, ()) for name, one in held.items()}
        return AdaptedSchema(fitted, tuple(self.notes), {wire: name for name, wire in self.names.items()})

    # --- the outermost schema ---------------------------------------------------------------------------------

    def _flatten_root(self, root: SchemaNode) -> SchemaNode:
        """Return the root as one plain object.

        Properties of alternatives and conditions become optional. Notes say which of them belong together.
        """
        flat = self._inline_references(root, ())
        kept_apart = flat.pop("allOf", ())
        own = {keyword: flat.pop(keyword) for keyword in _AT_ROOT if keyword in flat}
        for part in (own, *kept_apart):
            flat = self._merge_alternatives(flat, part)
        if own or kept_apart:  # the properties that these name would count as unevaluated
            for keyword in _UNEVALUATED:
                if refused := flat.pop(keyword, False):
                    self.notes.append(describe_schema_keyword(keyword, refused))
        return flat

    def _merge_alternatives(self, flat: dict[str, Any], part: SchemaNode) -> dict[str, Any]:
        """Return ``flat`` with the properties of the alternatives and conditions in ``part``.

        The notes get the alternatives and conditions in words.
        """
        for keyword in ("anyOf", "oneOf"):
            if branches := self._branches(part, keyword, ()):
                flat = merge_root_alternatives(flat, branches)
                self.notes.append(describe_property_alternatives(keyword, branches))
        dependent: SchemaNode = part.get("dependentSchemas", {})
        given = [part.get("then"), part.get("else"), *dependent.values()]
        if further := [
            self._inline_references(cast("SchemaNode", one), ()) for one in given if isinstance(one, Mapping)
        ]:
            flat = merge_root_alternatives(flat, [*further, {}])
        self.notes += [
            describe_schema_keyword(keyword, strip_property_descriptions(part[keyword]))
            for keyword in _SAID_AT_ROOT
            if keyword in part
        ]
        return flat

    def _branches(self, node: SchemaNode, keyword: str, trail: ReferenceTrail) -> list[dict[str, Any]]:
        """Return the alternatives of ``node``, each with the properties of its own alternatives."""
        found: list[dict[str, Any]] = []
        for one in cast("list[SchemaNode | bool]", node.get(keyword, ())):
            if not isinstance(one, bool):
                flat = self._inline_references(one, trail)
                further = (*trail, references) if (references := collect_schema_references(one)) else trail
                for part in (flat, *flat.get("allOf", ())):
                    for inner in ("anyOf", "oneOf"):
                        if branches := self._branches(part, inner, further):
                            flat = merge_root_alternatives(flat, branches)
                found.append(flat)
        return found

    def _inline_references(self, node: SchemaNode, trail: ReferenceTrail) -> dict[str, Any]:
        flat = dict(node)
        reference = flat.pop("$ref", None)
        if isinstance(reference, str):
            target = resolve_schema_reference(self.root, reference)
            if (why := self._why_not_followed(reference, trail)) is not None:
                flat = approximate_schema_intersection(flat, {"description": why})
            elif isinstance(target, Mapping):
                flat = approximate_schema_intersection(
                    flat, self._inline_references(cast("SchemaNode", target), (*trail, (reference,)))
                )
        for part in flat.pop("allOf", ()):
            if isinstance(part, Mapping):
                flat = approximate_schema_intersection(flat, self._inline_references(cast("SchemaNode", part), trail))
        return flat

    def _why_not_followed(self, reference: str, trail: ReferenceTrail) -> str | None:
        """Return the text in place of a reference that is not inlined; None if it is."""
        name = reference.rpartition("/")[2]
        if sum(reference in level for level in trail) >= MAX_UNROLLED:
            return f"same schema as the enclosing {name}"
        if len(trail) >= self.levels:
            self.goes_deeper = True
            return f"({name}: too large to show here; use info for the full schema)"
        return None

    def _references_to_inline(self, node: SchemaNode) -> tuple[str, ...]:
        """Return the references of ``node`` that the provider does not follow."""
        reference = node.get("$ref")
        if self.dialect.keywords is None:
            return (reference,) if isinstance(reference, str) and not LOCAL.match(reference) else ()
        return collect_schema_references(node)

    # --- any schema -------------------------------------------------------------------------------------------

    def _node(self, schema: object, trail: ReferenceTrail) -> dict[str, Any]:
        """Return one schema in the dialect.

        :param trail: the references that led to the schema
        """
        self.nodes += 1
        if not isinstance(schema, Mapping):
            return {} if schema is not False else {"description": "must be omitted"}
        node: dict[str, Any] = dict(cast("SchemaNode", schema))
        if self.nodes > self.most:
            if not self.cut:
                raise _SchemaTooLarge
            return {"description": "(too large to show here; use info for the full schema)"}
        if references := self._references_to_inline(node):
            node = self._inline_references(node, trail)
            trail = (*trail, references)
        words: list[str] = []
        if self.dialect.keywords is not None:
            node = self._restrict_keywords(node, self.dialect.keywords, words)
        fitted = self._adapt_subschemas(node, trail, words)
        if words:
            fitted["description"] = " ".join([*([fitted["description"]] if fitted.get("description") else []), *words])
        return fitted

    def _restrict_keywords(self, node: dict[str, Any], keywords: frozenset[str], words: list[str]) -> dict[str, Any]:
        """Return ``node`` with supported keywords only.

        :param words: collects the other keywords in words
        """
        if "allOf" in node:
            node = self._inline_references(node, ())
        _simplify_keywords(node)
        if "enum" in node:
            _type_by_enum(node, words)
        types = node.get("type")
        if isinstance(types, list):
            node = split_types_into_alternatives(node, cast("list[str]", types))
        if "patternProperties" in node and "patternProperties" not in keywords:
            node.pop("additionalProperties", None)  # it would apply to the properties that the patterns name
        if isinstance(node.get("anyOf"), list):
            node = move_constraints_into_branches(node)
        kept: dict[str, Any] = {}
        for keyword, value in node.items():
            if keyword == "format" and value not in _FORMATS:
                continue
            if keyword in keywords:
                kept[keyword] = value
            elif keyword not in _OMITTED_KEYWORDS:
                words.append(describe_schema_keyword(keyword, value))
        return kept

    def _adapt_subschemas(self, node: dict[str, Any], trail: ReferenceTrail, words: list[str]) -> dict[str, Any]:
        fitted = {key: value for key, value in node.items() if key not in ("$defs", "definitions")}
        if self.loosens:
            self._remove_inverting_keywords(fitted, words)
        for keyword in SCHEMAS_IN:
            if isinstance(fitted.get(keyword), Mapping):
                fitted[keyword] = self._node(fitted[keyword], trail)
        for keyword in LISTS_IN:
            if keyword in fitted:
                fitted[keyword] = [self._node(one, trail) for one in fitted[keyword]]
        for keyword in ("patternProperties", "dependentSchemas"):
            if keyword in fitted:
                fitted[keyword] = {name: self._node(one, trail) for name, one in fitted[keyword].items()}
        self._adapt_properties(fitted, trail)
        return fitted

    def _adapt_properties(self, node: dict[str, Any], trail: ReferenceTrail) -> None:
        """Adapt each property, under a name that the provider accepts."""
        if "properties" in node:
            node["properties"] = {
                self._wire_property(name): self._describe_renamed(name, self._node(one, trail))
                for name, one in node["properties"].items()
            }
        if "required" in node:
            node["required"] = [self._wire_property(name) for name in node["required"]]

    def _remove_inverting_keywords(self, node: dict[str, Any], words: list[str]) -> None:
        """Remove keywords that would become stricter by the adaptation.

        This happens if a schema within them is loosened, or a property is renamed.

        :param words: collects the removed keywords in words
        """
        if "oneOf" in node:
            any_of = {"anyOf": node.pop("oneOf")}
            node.update({"allOf": [*node.get("allOf", ()), any_of]} if "anyOf" in node else any_of)
        for keyword in _INVERTING_KEYWORDS:
            if keyword in node:
                words.append(describe_schema_keyword(keyword, node.pop(keyword)))
        if self.names and "patternProperties" in node:
            words.append(describe_schema_keyword("patternProperties", node.pop("patternProperties")))
            node.pop("additionalProperties", None)

    def _wire_property(self, name: str) -> str:
        return self.names.get(name, name)

    def _describe_renamed(self, name: str, node: dict[str, Any]) -> dict[str, Any]:
        if name not in self.names:
            return node
        return {**node, "description": " ".join([f"{name}:", str(node.get("description", ""))]).strip()}


def _rename_refused_properties(root: SchemaNode, dialect: ProviderSchemaDialect) -> dict[str, str]:
    """Return new names for the properties whose names the provider refuses. No other property has them."""
    if dialect.property_names is None:
        return {}
    allowed = dialect.property_names
    every = {name for node in iterate_schemas(root) for name in list_property_names(node)}
    found: dict[str, str] = {}
    for name in sorted(every):
        if not allowed.match(name):
            slug = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")[:40]
            found[name] = f"p_{slug}_{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
    return found
