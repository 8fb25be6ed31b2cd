"""OpenAI's parameters that this server does not act on: what is accepted all the same, and why.

A parameter that would change the answer is either honoured (`ChatBody`, `CompletionBody`) or refused by its name: never
accepted and dropped. What is accepted here is accepted because it changes nothing:

    neutral     only with a value that asks for what the server does anyway; any other value is a 400
    harmless    with any value of the right type: it says nothing about the answer
    refused     with no value but null
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engine.errors import InvalidRequestError, UnsupportedParameterError


class Neutral(NamedTuple):
    values: tuple[object, ...]


class Harmless(NamedTuple):
    type: type
    why: str


class Inert(NamedTuple):
    """The parameters of one route."""

    neutral: Mapping[str, Neutral]
    harmless: Mapping[str, Harmless]
    refused: frozenset[str]


_CHAT_NEUTRAL: dict[str, Neutral] = {
    "tool_choice": Neutral(("none", "auto")),  # without tools, auto is none
    "functions": Neutral(([],)),
    "function_call": Neutral(("none", "auto")),
    "response_format": Neutral(({"type": "text"},)),
    "modalities": Neutral((["text"],)),
    "reasoning_effort": Neutral(("none",)),
    "verbosity": Neutral(("medium",)),
    "prompt_cache_retention": Neutral(("in_memory", "in-memory")),
    "service_tier": Neutral(("auto", "default")),  # flex and priority are promises that nobody here keeps
}

_CHAT_HARMLESS: dict[str, Harmless] = {
    "metadata": Harmless(dict, "labels of a stored completion; none is stored"),
    "store": Harmless(bool, "for the vendor's dashboards and training; nothing is kept here"),
    "parallel_tool_calls": Harmless(bool, "how tools are called; no tools are accepted"),
    "safety_identifier": Harmless(str, "for the vendor's abuse reports"),
}

CHAT = Inert(
    _CHAT_NEUTRAL,
    _CHAT_HARMLESS,
    frozenset({"audio", "moderation", "prediction", "prompt_cache_options", "web_search_options"}),
)
COMPLETION = Inert({"echo": Neutral((False,)), "suffix": Neutral(("",))}, {}, frozenset())


def without_inert(body: Mapping[str, object], inert: Inert) -> dict[str, object]:
    """`body` without nulls (which mean *not given*) and without what changes nothing. Raises `RequestError`."""
    return {name: value for name, value in body.items() if value is not None and not _is_inert(name, value, inert)}


def _is_inert(name: str, value: object, inert: Inert) -> bool:
    if name in inert.refused:
        raise UnsupportedParameterError(f"`{name}` is not supported.", param=name)
    if (neutral := inert.neutral.get(name)) is not None:
        if not any(_same(value, accepted) for accepted in neutral.values):
            allowed = " or ".join(repr(accepted) for accepted in neutral.values)
            raise UnsupportedParameterError(f"`{name}` is not supported, except as {allowed}.", param=name)
        return True
    if (harmless := inert.harmless.get(name)) is not None:
        if type(value) is not harmless.type:
            raise InvalidRequestError(f"`{name}` has the wrong type.", param=name)
        return True
    return False


def _same(value: object, accepted: object) -> bool:
    # False == 0 in Python; in JSON they are different things.
    return isinstance(value, bool) == isinstance(accepted, bool) and value == accepted
