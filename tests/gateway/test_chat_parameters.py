from __future__ import annotations

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase

from engine.errors import UnsupportedParameterError
from gateway.chat_parameters import HARMLESS, NEUTRAL, REFUSED, without_inert
from gateway.chat_request import ChatBody

TABLES = [set(ChatBody.__struct_fields__), set(NEUTRAL), set(HARMLESS), set(REFUSED)]


def test_every_parameter_of_the_sdk_is_declared_once() -> None:
    """A new parameter of OpenAI's must be decided on, not fall through as unknown or be dropped."""
    known = set().union(*TABLES)
    assert set(CompletionCreateParamsBase.__annotations__) - known == set()
    assert sum(map(len, TABLES)) == len(known)


def test_null_means_not_given() -> None:
    assert without_inert({"audio": None, "tools": None, "n": None, "seed": 1}) == {"seed": 1}


def test_false_is_not_zero_and_zero_is_not_false() -> None:
    """Python's `False == 0` would accept `logprobs: 0` and `top_logprobs: false`."""
    assert without_inert({"logprobs": False, "top_logprobs": 0}) == {}
    for name, value in [("logprobs", 0), ("top_logprobs", False)]:
        with pytest.raises(UnsupportedParameterError) as caught:
            without_inert({name: value})
        assert caught.value.param == name
