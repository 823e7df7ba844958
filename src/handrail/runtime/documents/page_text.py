"""The text of a web page: its main content, with tables and code as they are, and without hidden elements.

Documentation and articles need different extractors. An article is surrounded by text that is like it (teasers, comments),
which trafilatura separates well, but it loses tables and code. Documentation marks its content (``<main>``,
``role="main"``), so that container is read as a whole with resiliparse. ``bench/extraction.py`` measures both.

This module runs in a separate process (:mod:`~handrail.origins.bounded_program`): a hostile page can keep each of
these libraries busy for minutes.
"""

from __future__ import annotations

import html
import itertools
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urljoin

_MIN_MARKED_BLOCKS = 6
"""The number of ``<pre>``, ``<table>`` and ``<dl>`` elements from which a page is read as documentation."""
_MIN_ARTICLE = 300
"""The characters below which an article is taken as not found."""
_SHORT_ARTICLE = 1500
"""The characters below which a page may have its article in an element that it hides."""
_MIN_BLOCK_SHARE = 0.1
"""The share of the text in these elements from which a page without another sign is read as documentation."""
_MAX_LINKS = 100
_MAX_LINK_TEXT = 200
_MAX_STYLE = 200_000
_MAX_LINKED = 2_000_000
"""The characters of a page that are searched for links."""
_MAX_SELECTORS = 500

_BLOCK = re.compile(r"<(?:pre|table|dl)\b", re.IGNORECASE)
_META_CHARSET = re.compile(rb"""<meta[^>]{0,300}?charset\s*=\s*["']?\s*([\w.:-]{1,40})""", re.IGNORECASE)
_GENERATOR = re.compile(
    r"sphinx|docutils|mkdocs|docusaurus|rustdoc|javadoc|doxygen|gitbook|vitepress|vuepress|asciidoctor|docbook|texinfo|"
    r"makeinfo|pdoc|typedoc|yard|nextra|starlight|antora|jsdoc|dokka",
    re.IGNORECASE,
)
_DOCUMENTATION_CLASS = re.compile(
    r"""<(?:div|section|body|main|article)\b[^>]{0,200}\bclass=["'][^"'>]{0,200}"""
    r"(?:sphinxsidebar|rst-content|wy-nav|rustdoc|md-main|theme-doc|devsite|markdown-body)",
    re.IGNORECASE,
)
_CONTAINERS = ('[role="main"]', "main", "#main-content", "article")
_NAVIGATION = "nav, footer, [role='navigation'], .toc, .breadcrumbs, .md-sidebar"
_PERMALINK = re.compile(r"""<a\b[^>]{0,300}\bclass=["'](?:headerlink|anchor|hash-link)["'][^>]{0,300}>[^<]{0,20}</a>""")
_LINK = re.compile(r"<a\b([^>]{0,3000})>(.{0,2000}?)</a\s*>", re.IGNORECASE | re.DOTALL)
_HREF = re.compile(r"""\bhref\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]+))""", re.IGNORECASE)
_TAG = re.compile(r"<[^>]*>")
_STYLE = re.compile(r"""<[a-z][^<>]{0,1000}?\sstyle\s*=\s*(?:"([^"]{0,2000})"|'([^']{0,2000})')""", re.IGNORECASE)
_HIDDEN_STYLE = re.compile(
    r"display:none|(?:^|;)visibility:(?:hidden|collapse)|content-visibility:hidden|opacity:0?(?:\.0+)?(?:;|$|!)|opacity\(0?(?:\.0+)?%?\)|"
    r"font-size:(?:0|0?\.\d+|[012](?:\.\d+)?px|0?\.0\d*(?:em|rem|pt|%))(?:px|em|rem|pt|%)?(?:;|$|!)|"
    r"(?:left|top|right|bottom|text-indent|margin-left|margin-top):-\d{3,}|clip:rect\(0|"
    r"clip-path:(?:inset\((?:50|100)%|circle\(0|polygon\(0(?:px|%)?0)|"
    r"transform:[^;]*(?:scale[xy]?\(0[,)]|translate(?:x|y|3d)?\([^)]*-\d{3,}|rotate[xy]\(90deg)|"
    r"(?:^|;)(?:max-)?(?:height|width):[01](?:px)?;.*overflow:hidden|"
    r"overflow:hidden;.*(?:max-)?(?:height|width):[01](?:px)?(?:;|$)"
)
_COLOUR = re.compile(r"(?:^|;)color:([^;!]+)")
_BACKGROUND = re.compile(r"(?:^|;)background(?:-color)?:([^;!]+)")
_COLOUR_VALUE = re.compile(r"#(?P<hex>[0-9a-f]{3,8})|rgba?\((?P<parts>[\d.,/%]+)\)|(?P<name>white|black|transparent)")
_NAMED_COLOURS = {"white": (255, 255, 255, 1.0), "black": (0, 0, 0, 1.0), "transparent": (0, 0, 0, 0.0)}
_WHITE = _NAMED_COLOURS["white"]
_NEAR_COLOUR = 12
"""The difference of two colours, for red, green and blue each, up to which a reader sees one colour."""
_RULE = re.compile(r"([^{}]{1,300})\{([^{}]{0,2000})\}")
_PART = r"(?:[a-zA-Z][\w-]*(?:[.#][\w-]+)*|(?:[.#][\w-]+)+)"
_PLAIN_SELECTOR = re.compile(rf"{_PART}(?:(?:\s*>\s*|\s+){_PART}){{0,8}}")
_OTHER_MEDIA = re.compile(r"@media(?![^{]{0,300}\b(?:all|screen)\b)[^{]{0,300}\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}")
_NARROW_MEDIA = re.compile(r"@media[^{]{0,300}\([^{]{0,300}\{(?:[^{}]*\{[^{}]*\})*[^{}]*\}")
_MEDIA_START = re.compile(r"@media[^{]{0,300}\{")
_NEVER_SHOWN = ("[hidden]", "template", "noframes", "canvas", "dialog:not([open])")


class PageText(NamedTuple):
    """The text of a page.

    :param part: ``main`` for the main content, ``whole`` for all of the page
    :param links: text and absolute URL of the links in that part
    :param hidden_elements: how many elements with text the page's own markup hides
    :param keeps_hidden: whether their text is part of ``text``, because the page would have hardly any other
    :param scripts: how many scripts the page has
    """

    title: str
    text: str
    part: str
    links: list[tuple[str, str]]
    hidden_elements: int
    keeps_hidden: bool
    scripts: int


def decode_web_page(data: bytes, charset: str | None) -> str:
    """Decode a page: by the charset of its response, else by its meta element, else by detection."""
    from resiliparse.parse.encoding import (  # pyright: ignore[reportMissingModuleSource]
        bytes_to_str,
        detect_encoding,
        map_encoding_to_html5,
    )

    for mark, name in ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if data.startswith(mark):
            return data[len(mark) :].decode(name, "replace")
    if not (found := charset) and (meta := _META_CHARSET.search(data[:4096])):
        found = meta.group(1).decode("ascii", "replace")
    mapped = map_encoding_to_html5(found, fallback_utf8=False) if found else None
    return bytes_to_str(data, mapped or detect_encoding(data[:200_000]) or "utf-8", errors="replace").replace("\0", "�")


def extract_main_page_text(page: str, url: str) -> PageText:
    """Return the text of a page's main content.

    :param url: of the page, for links
    """
    from resiliparse.parse.html import HTMLTree

    tree: Any = HTMLTree.parse(page)
    scripts = len(tree.document.query_selector_all("script"))
    hidden, removed = _remove_hidden_elements(tree, page)
    visible = str(tree) if removed else page
    is_documentation = _has_documentation_mark(tree, page)
    container = _find_container(tree)
    text, part, source, keeps_hidden = "", "main", container, False
    if (is_documentation or _consists_of_blocks(container or tree.body, visible)) and (
        found := _read_documentation(visible, container, is_documentation)
    ):
        text = found
    if not text:
        text = _read_article_or_main(visible)
        if removed and len(text) < _SHORT_ARTICLE:
            # Some pages hide their article until a script shows it. A short page never keeps what it hides.
            complete = _read_article_or_main(page)
            if len(complete) >= 3 * len(text) and len(complete) - len(text) >= _SHORT_ARTICLE:
                text, keeps_hidden = complete, True
    # A browser with scripts does not show the text in noscript: only a page with little other text keeps it.
    if len(text) < _MIN_ARTICLE and len(whole := _plain(visible, main=False, noscript=True)) > 3 * len(text):
        text, part, source = whole, "whole", tree.body
    title = (tree.title or "").strip()
    links = _list_links(source or tree.body, url)
    return PageText(title, _normalise_whitespace(text), part, links, hidden, keeps_hidden, scripts)


def strip_tags(page: str) -> str:
    """Return the text of all of a page by a linear scan, for a page that no parser finishes."""
    out: list[str] = []
    at, end = 0, len(page)
    while at < end:
        if (begin := page.find("<", at)) < 0:
            out.append(page[at:])
            break
        out.append(page[at:begin])
        name = page[begin + 1 : begin + 8].lower()
        skip = next((one for one in ("script", "style") if name.startswith(one)), None)
        close = page.find(f"</{skip}", begin) if skip else page.find(">", begin)
        if close < 0:
            break
        at = close + 1
        if skip is None:
            out.append("\n" if name[:1] in "/phldtu" else " ")
    return _normalise_whitespace(html.unescape("".join(out)))


def _plain(page: str, *, main: bool, noscript: bool = False) -> str:
    from resiliparse.extract.html2text import extract_plain_text  # pyright: ignore[reportMissingModuleSource]

    return extract_plain_text(
        page, main_content=main, links=False, alt_texts=False, preserve_formatting=True, noscript=noscript
    )


def _read_article(page: str) -> str:
    logging.disable(logging.CRITICAL)
    import trafilatura

    try:
        return trafilatura.extract(page, favor_recall=True, include_comments=False, deduplicate=False) or ""
    except (ValueError, TypeError, RecursionError, AssertionError):  # a page that it cannot parse
        return ""


def _read_article_or_main(page: str) -> str:
    text = _read_article(page)
    return text if len(text) >= _MIN_ARTICLE else _plain(page, main=True)


def _consists_of_blocks(scope: Any, page: str) -> bool:
    """Return whether much of the text of an element is in ``<pre>``, ``<table>`` and ``<dl>`` elements."""
    if scope is None or len(_BLOCK.findall(page)) < _MIN_MARKED_BLOCKS:
        return False
    inside = sum(
        _count_characters(one) for one in scope.query_selector_all("pre, table, dl") if not _is_nested(one, scope)
    )
    return inside >= _MIN_BLOCK_SHARE * _count_characters(scope)


def _count_characters(element: Any) -> int:
    return len(" ".join((element.text or "").split()))


def _is_nested(element: Any, scope: Any) -> bool:
    above = element.parent
    while above is not None and above != scope:
        if above.tag in ("pre", "table", "dl"):
            return True
        above = above.parent
    return False


def _read_documentation(page: str, container: Any, is_documentation: bool) -> str:
    main = _plain(page, main=True)
    if container is None:
        return main
    for one in container.query_selector_all(_NAVIGATION):
        if one.parent is not None:
            one.parent.remove_child(one)
    text = _plain(_PERMALINK.sub("", container.html), main=False)
    if len(text) < len(main) // 2 or (not is_documentation and len(text) > 2 * len(main)):
        return main
    return text


def _has_documentation_mark(tree: Any, page: str) -> bool:
    names = (one.getattr("content") or "" for one in tree.document.query_selector_all('meta[name="generator"]'))
    return any(_GENERATOR.search(name) for name in names) or _DOCUMENTATION_CLASS.search(page) is not None


def _find_container(tree: Any) -> Any:
    for selector in _CONTAINERS:
        if len(found := tree.document.query_selector_all(selector)) == 1:
            return found[0]
    return None


def _remove_hidden_elements(tree: Any, page: str) -> tuple[int, int]:
    """Remove the elements that a reader of the page does not see, as far as its own markup says so.

    A collection of elements is slow to iterate, so each selector finds hidden elements only.

    :return: how many of the removed elements had text, and how many were removed
    """
    styles = dict.fromkeys(html.unescape(one or other) for one, other in _STYLE.findall(page))
    hiding = [one for one in styles if _hides_text(one) and not any(sign in one for sign in '"\\\n')]
    selectors = [*_NEVER_SHOWN, *_list_hiding_selectors(tree)]
    selectors += [f'[style="{one}"]' for one in hiding[:_MAX_SELECTORS]]
    coloured = [one for one in tree.document.query_selector_all("font[color]") if _hides_text(f"color:{one['color']}")]
    with_text = removed = 0
    found = (one for selector in selectors for one in tree.document.query_selector_all(selector))
    for one in itertools.chain(coloured, found):
        if one.parent is None or one.tag in ("html", "body", "head"):
            continue
        with_text += bool((one.text or "").strip())
        removed += 1
        one.parent.remove_child(one)
    return with_text, removed


def _list_hiding_selectors(tree: Any) -> list[str]:
    style = "\n".join(one.text or "" for one in tree.document.query_selector_all("style"))[:_MAX_STYLE]
    plain = re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)
    # Rules for print, or for a width of the window, say nothing about what a reader sees here.
    general = _MEDIA_START.sub("", _NARROW_MEDIA.sub("", _OTHER_MEDIA.sub("", plain)))
    found: list[str] = []
    for names, body in _RULE.findall(general):
        if _hides_text(body):
            found += [one for name in names.split(",") if _PLAIN_SELECTOR.fullmatch(one := name.strip(" \t\r\n}"))]
    return found[:_MAX_SELECTORS]


def _hides_text(style: str) -> bool:
    plain = re.sub(r"\s+", "", style.lower())
    if _HIDDEN_STYLE.search(plain):
        return True
    ink = _COLOUR.search(plain)
    colour = None if ink is None else _parse_colour(ink.group(1))
    if colour is None:
        return False
    if colour[3] < 0.1:
        return True
    background = _BACKGROUND.search(plain)
    paper = _WHITE if background is None else _parse_colour(background.group(1))
    return paper is not None and all(abs(colour[i] - paper[i]) <= _NEAR_COLOUR for i in range(3))


def _parse_colour(text: str) -> tuple[float, float, float, float] | None:
    """Return red, green, blue (0 to 255) and alpha (0 to 1) of a CSS colour without spaces; None if it is another form."""
    if (found := _COLOUR_VALUE.match(text)) is None:
        return None
    if name := found["name"]:
        return _NAMED_COLOURS[name]
    if digits := found["hex"]:
        if len(digits) in (3, 4):
            digits = "".join(one * 2 for one in digits)
        if len(digits) not in (6, 8):
            return None
        red, green, blue, alpha = (int(f"{digits}ff"[i : i + 2], 16) for i in (0, 2, 4, 6))
        return red, green, blue, alpha / 255
    try:
        parts = [
            float(one.rstrip("%")) * (2.55 if one.endswith("%") else 1) for one in re.split("[,/]", found["parts"])
        ]
    except ValueError:
        return None
    alpha = parts[3] if len(parts) > 3 else 1.0
    return None if len(parts) < 3 else (parts[0], parts[1], parts[2], alpha)


def _list_links(element: Any, url: str) -> list[tuple[str, str]]:
    links: dict[str, str] = {}
    source: str = "" if element is None else element.html[:_MAX_LINKED]
    for attributes, content in _LINK.findall(source):
        if (found := _HREF.search(attributes)) is None:
            continue
        target = html.unescape(next(filter(None, found.groups()), "")).strip()
        if not target or target.startswith("#"):
            continue
        text = " ".join(html.unescape(_TAG.sub(" ", content)).split())[:_MAX_LINK_TEXT]
        try:
            absolute = urljoin(url, target).partition("#")[0]
        except ValueError:
            continue
        if text and absolute.startswith(("http://", "https://")) and absolute != url and len(absolute) <= 2048:
            links.setdefault(absolute, text)
        if len(links) >= _MAX_LINKS:
            break
    return [(text, target) for target, text in links.items()]


def _normalise_whitespace(text: str) -> str:
    lines = (line.rstrip() for line in text.replace("\r\n", "\n").split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def compute_values(question: Mapping[str, Any], data: bytes) -> Iterator[dict[str, object]]:
    """Yield the text of a page as one value.

    :param question: the ``charset`` and the ``url`` of the page, and whether to ``only_strip_tags``
    """
    page = decode_web_page(data, question["charset"])
    if question["only_strip_tags"]:
        yield {"text": strip_tags(page), "part": "whole"}
    else:
        yield extract_main_page_text(page, question["url"])._asdict()
