"""What in a prompt will keep its prefix from being found again: text that is another in the next request.

    You are … Today is 2026-03-01 14:22. …        everything behind the date is computed anew, every time
                       ^^^^^^^^^^^^^^^^ date and time

A prefix is shared up to the first token that differs; so what is volatile belongs behind what is not: dates, ids,
names of users into the last message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MONTH = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DAY = "(?:mon|tues|wednes|thurs|fri|satur|sun)day"
_HEX = "[0-9a-f]"

# Volatile however it is used, or nearly so. In order: where two match, the first names it.
_KINDS: tuple[tuple[str, str], ...] = (
    ("date and time", r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z| ?[+-]\d\d:?\d\d)?"),
    (
        "date and time",
        rf"{_DAY},? +(?:{_MONTH} +\d{{1,2}}|\d{{1,2}} +{_MONTH}),? +\d{{4}}(?:,? +\d\d?:\d\d(?::\d\d)?)?",
    ),
    ("time of day", r"(?:time|clock|now)[^.\n]{0,24}?\b\d{1,2}:\d\d(?::\d\d)?(?: ?[ap]m)?"),
    (
        "today's date",
        rf"\b(?:today|current|now|as of|date)\b[^.\n]{{0,24}}?"
        rf"(?:\d{{4}}-\d\d-\d\d|\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}"
        rf"|{_MONTH}\.? +\d{{1,2}},? +\d{{4}}|\d{{1,2}} +{_MONTH}\.? +\d{{4}})",
    ),
    ("UUID", rf"\b{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}\b"),
    ("Unix time", r"\b(?:1[6-9]|2[0-2])\d{8}(?:\d{3})?\b"),
    (
        "id of a request or session",
        r"\b(?:request|session|trace|conversation|correlation|thread|message)[ _-]?id\b\W{0,3}[\w-]{6,}",
    ),
    ("name or address of a user", r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    (
        "name or address of a user",
        r"(?:user(?:'s)? ?name|user|customer)(?: is(?: named| called)?|:| named| called) +(?-i:[A-Z])\w+",
    ),
    ("unfilled template", r"\{\{ ?\w+ ?\}\}|\$\{\w+\}|<%= ?\w+ ?%>"),
)
_PATTERN = re.compile("|".join(f"(?P<k{i}>{pattern})" for i, (_, pattern) in enumerate(_KINDS)), re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Finding:
    kind: str
    text: str
    start: int  # characters into its part
    part: int  # which of the prompt's parts, in the order of the prompt
    num_behind: int  # characters of the prompt behind it that will not be found again


def lint(parts: Sequence[str]) -> list[Finding]:
    """Findings in the order of the prompt. The last part is the question: nothing behind it could be shared."""
    findings: list[Finding] = []
    behind = sum(map(len, parts))
    for i, part in enumerate(parts[:-1] if len(parts) > 1 else parts):
        for kind, match in _volatile(part):
            findings.append(Finding(kind, match[0], match.start(), i, behind - match.end()))
        behind -= len(part)
    return findings


def _volatile(text: str) -> Iterator[tuple[str, re.Match[str]]]:
    for match in _PATTERN.finditer(text):
        assert match.lastgroup is not None, "every alternative is a group"
        yield _KINDS[int(match.lastgroup[1:])][0], match
