"""What in a prompt will keep its prefix from being found again: text that is another in the next request.

    You are … Today is 2026-03-01 14:22. …        everything behind the date is computed anew, every time
                       ^^^^^^^^^^^^^^^^ date and time

A prefix is shared up to the first token that differs; so what is volatile belongs behind what is not: dates, ids,
names of users into the last message.

Before prompts are sent, only what is volatile by its looks can be named (`lint`, and `first_volatile`). Where two
prompts are known to differ, less is enough: a bare "14:22" there is a time (`volatile_at`). The command, the cache
report and the dashboard all ask here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
# Volatile where two prompts part. Elsewhere they may be anything: a date of publication, opening hours, a price.
_SUSPECTS: tuple[tuple[str, str], ...] = (
    *_KINDS,
    ("today's date", r"\d{4}-\d\d-\d\d|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b"),
    (
        "today's date",
        rf"\b{_MONTH}\.? +\d{{1,2}}(?:,? +\d{{4}})?\b|\b\d{{1,2}} +{_MONTH}\.?(?: +\d{{4}})?\b|\b{_DAY}\b",
    ),
    ("time of day", r"\b\d{1,2}:\d\d(?::\d\d)?\b(?: ?[ap]m)?"),
    ("id of a request or session", rf"\b(?=\w*\d){_HEX}{{12,}}\b"),
)
TIMES = frozenset({"date and time", "time of day", "today's date", "Unix time"})
_WINDOW = 80  # characters around a difference that are looked at


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
        for match in _PATTERN.finditer(part):
            findings.append(Finding(_kind(_KINDS, match), match[0], match.start(), i, behind - match.end()))
        behind -= len(part)
    return findings


def first_volatile(text: str) -> Finding | None:
    """What makes a text volatile by its looks alone, if anything does."""
    return next((_finding(_KINDS, match, len(text)) for match in _PATTERN.finditer(text)), None)


def volatile_at(text: str, position: int) -> Finding | None:
    """What stands where a text is known to part from another one."""
    start = max(0, position - _WINDOW)
    for match in _SUSPECT_PATTERN.finditer(text, start, position + _WINDOW):
        if match.start() <= position <= match.end():
            return _finding(_SUSPECTS, match, len(text))
    return None


def _finding(kinds: tuple[tuple[str, str], ...], match: re.Match[str], length: int) -> Finding:
    return Finding(_kind(kinds, match), match[0], match.start(), 0, length - match.end())


def _kind(kinds: tuple[tuple[str, str], ...], match: re.Match[str]) -> str:
    assert match.lastgroup is not None, "every alternative is a group"
    return kinds[int(match.lastgroup[1:])][0]


def _compiled(kinds: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?P<k{i}>{pattern})" for i, (_, pattern) in enumerate(kinds)), re.IGNORECASE)


_PATTERN, _SUSPECT_PATTERN = _compiled(_KINDS), _compiled(_SUSPECTS)
