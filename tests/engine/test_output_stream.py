"""Which tokens come with which text: log probabilities must fit the text that the client sees."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from tokenizers import Tokenizer

from engine.batch import TokenLogprobs
from engine.output_stream import OutputRules, OutputStream
from engine.protocol import FinishReason, SamplingParams, Segment, SegmentKind, Submit
from engine.request import Request
from tests.engine.harness import EOS, SCOPE_A, engine_info
from tests.gateway.byte_tokenizer import byte_tokenizer

Pieces = list[tuple[str, list[bytes]]]


def run(token_ids: Sequence[int], *, tokenizer: Tokenizer | None = None, **sampling: object) -> Pieces:
    """Text and tokens of every delta."""
    info = engine_info(num_blocks=64, block_size=4, max_model_len=256)
    if tokenizer is not None:
        info = msgspec.structs.replace(info, tokenizer_json=tokenizer.to_str().encode())
    params = SamplingParams(**{"max_tokens": 99, "num_logprobs": 1, **sampling})
    submit = Submit(
        request_id="r", tenant_id="t", segments=(Segment.of(SegmentKind.QUESTION, [1], SCOPE_A),), sampling=params
    )
    request = Request(submit, 4, 0, 0)
    stream = OutputStream(request, OutputRules(info))
    pieces: Pieces = []
    for token_id in token_ids:
        request.append_output(token_id)
        delta = stream.push(token_id, TokenLogprobs(-1.0, ((token_id, -1.0),)))
        if delta is not None:
            assert all(token.top[0].token == token.token for token in delta.tokens)
            pieces.append((delta.text, [token.token for token in delta.tokens]))
            if delta.finish_reason is not None:
                assert delta.finish_reason in FinishReason
                break
    return pieces


def test_each_token_comes_with_its_text_and_the_end_of_turn_is_none() -> None:
    assert run([5, 6, EOS]) == [("w5 ", [b"w5 "]), (" w6 ", [b" w6 "]), ("", [])]


def test_tokens_that_a_stop_string_cuts_off_are_not_told_of() -> None:
    """Held back while they may become a stop string; then they are either text, or nothing."""
    stop = (" w6  w7",)
    assert run([5, 6, 7], stop=stop) == [("w5", [b"w5 "]), (" ", []), ("", [])]
    assert run([5, 6, 8, EOS], stop=stop) == [
        ("w5", [b"w5 "]),
        (" ", []),
        (" w6  w8", [b" w6 ", b" w8 "]),
        (" ", []),
    ]
    # Cut in its middle, a token has come out in part: it is told of.
    assert run([5, 6], stop=("6",)) == [("w5 ", [b"w5 "]), (" w", [b" w6 "])]


def test_what_is_still_held_at_the_last_token_comes_with_it() -> None:
    assert run([5, 6], stop=(" w6  w7",), max_tokens=2) == [("w5", [b"w5 "]), ("  w6 ", [b" w6 "])]


def test_the_parts_of_a_character_come_with_the_character() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("aé", add_special_tokens=False).ids
    assert run(ids, tokenizer=tokenizer, max_tokens=3) == [("a", [b"a"]), ("é", [b"\xc3", b"\xa9"])]


def test_without_asking_there_are_none() -> None:
    info = engine_info(num_blocks=64, block_size=4, max_model_len=256)
    segment = Segment.of(SegmentKind.QUESTION, [1], SCOPE_A)
    sampling = SamplingParams(max_tokens=9)
    request = Request(Submit(request_id="r", tenant_id="t", segments=(segment,), sampling=sampling), 4, 0, 0)
    request.append_output(5)
    delta = OutputStream(request, OutputRules(info)).push(5)
    assert delta is not None
    assert delta.tokens == ()
