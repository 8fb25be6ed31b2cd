from __future__ import annotations

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from engine.errors import UnsupportedParameterError
from gateway.chat_request import ChatBody
from gateway.completion_request import CompletionBody
from gateway.generation_fields import GenerationFields
from gateway.inert_parameters import CHAT, COMPLETION, Inert, without_inert


@pytest.mark.parametrize(
    ("sdk", "body", "inert"), [(ChatParams, ChatBody, CHAT), (CompletionParams, CompletionBody, COMPLETION)]
)
def test_every_parameter_of_the_sdk_is_declared_once(sdk: type, body: type[GenerationFields], inert: Inert) -> None:
    """A new parameter of OpenAI's must be decided on, not fall through as unknown or be dropped."""
    tables = [set(body.__struct_fields__), set(inert.neutral), set(inert.harmless), set(inert.refused)]
    known = set().union(*tables)
    assert set(sdk.__annotations__) - known == set()
    assert sum(map(len, tables)) == len(known)


def test_null_means_not_given() -> None:
    assert without_inert({"audio": None, "tools": None, "n": None, "seed": 1}, CHAT) == {"seed": 1}


def test_false_is_not_zero_and_zero_is_not_false() -> None:
    """Python's `False == 0` would accept `echo: 0`."""
    assert without_inert({"echo": False}, COMPLETION) == {}
    with pytest.raises(UnsupportedParameterError) as caught:
        without_inert({"echo": 0}, COMPLETION)
    assert caught.value.param == "echo"
