"""How large an automaton a regular expression becomes, by reading it once."""

from __future__ import annotations

import re

MOST = 1e15
_COUNTED = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
_CLASS_OF_UNICODE, _NEGATED_CLASS, _ANY, _BEYOND_ASCII = 400.0, 12.0, 10.0, 4.0


def pattern_states(pattern: str) -> float:
    """About how many states an engine without backtracking makes of ``pattern``: what is repeated counts that often."""
    total, last = [1.0], [0.0]
    index, length = 0, len(pattern)
    while index < length:
        char = pattern[index]
        if char == "(":
            total.append(0.0)
            last.append(0.0)
            index += 1
            continue
        if char == ")" and len(total) > 1:
            group = total.pop()
            last.pop()
            total[-1] += group
            last[-1] = group
        elif char == "{" and (counted := _COUNTED.match(pattern, index)):
            times = max(int(n) for n in counted.groups() if n)
            total[-1] = min(total[-1] + last[-1] * max(times - 1, 0), MOST)
            last[-1] *= max(times, 1)
            index = counted.end()
            continue
        else:
            weight, index = _atom(pattern, index)
            total[-1] += weight
            if weight:
                last[-1] = weight
            continue
        index += 1
    return min(sum(total), MOST)


def _atom(pattern: str, index: int) -> tuple[float, int]:
    """States of what stands at ``index``, and where the next begins."""
    char = pattern[index]
    if char in "*+?|^$":
        return 0.0, index + 1
    if char == ".":
        return _ANY, index + 1
    if char == "\\":
        kind = pattern[index + 1 : index + 2]
        if kind in ("p", "P") and pattern[index + 2 : index + 3] == "{":
            return _CLASS_OF_UNICODE, max(pattern.find("}", index), index + 2) + 1
        return (2.0 if kind not in ("p", "P", "W", "D", "S") else _NEGATED_CLASS), index + 2
    if char == "[":
        end, weight = index + 1, 2.0
        if pattern[end : end + 1] == "^":
            end, weight = end + 1, _NEGATED_CLASS
        first = end
        while end < len(pattern) and (pattern[end] != "]" or end == first):
            if pattern[end] == "\\":
                weight += _CLASS_OF_UNICODE if pattern[end + 1 : end + 2] in ("p", "P") else 0.0
                end += 1
            elif not pattern[end].isascii():
                weight += _BEYOND_ASCII
            end += 1
        return weight, end + 1
    return (1.0 if char.isascii() else _BEYOND_ASCII), index + 1
