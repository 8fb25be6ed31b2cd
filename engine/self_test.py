"""At start: one canned prompt, asked twice. The second time it must come from the cache, and say the same.

A cache that never hits is silent: every answer is right, only slow. So an engine proves a hit before it serves.
"""

from __future__ import annotations

from engine.engine import LLMEngine
from engine.errors import ModelLoadError
from engine.protocol import Failure, PromptAccount, SamplingParams, Segment, SegmentKind, Submit
from engine.scoped_tokens import SCOPE_BYTES

_SCOPE = b"self-test".ljust(SCOPE_BYTES, b"-")
_OUTPUT_TOKENS = 2


def prove_reuse(engine: LLMEngine, *, caching: bool) -> None:
    """Raises `ModelLoadError` if the second answer differs, or was computed again although caching is on."""
    info = engine.info()
    length = min(2 * info.block_size + 1, info.max_model_len - _OUTPUT_TOKENS)
    token_ids = [position % info.vocab_size for position in range(length)]
    cold_text, _ = _ask(engine, "cold", token_ids)
    warm_text, account = _ask(engine, "warm", token_ids)
    if warm_text != cold_text:
        raise ModelLoadError(f"self-test: the cached prompt answered {warm_text!r}, the same computed {cold_text!r}")
    # The last output token is never computed. What is left of a block that did not fill is not found again.
    filled = (length + _OUTPUT_TOKENS - 1) // info.block_size * info.block_size
    expected = min(length - 1, filled) if caching else 0
    if account.num_cached_tokens != expected:
        raise ModelLoadError(f"self-test: {account.num_cached_tokens} of {length} tokens were found, not {expected}")
    engine.forget_everything()


def _ask(engine: LLMEngine, name: str, token_ids: list[int]) -> tuple[str, PromptAccount]:
    segment = Segment.of(SegmentKind.QUESTION, token_ids, _SCOPE)
    sampling = SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    engine.add_request(Submit(request_id=name, tenant_id="self-test", segments=(segment,), sampling=sampling))
    text, account = "", PromptAccount()
    while engine.has_work():
        for message in engine.step():
            if isinstance(message, Failure):
                raise ModelLoadError(f"self-test: {message.message}")
            text += message.text
            account = message.account or account
    return text, account
