"""From the tokens of one request to the deltas its client sees, and the reason it ends."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from engine.detokenizer import IncrementalDetokenizer
from engine.protocol import Delta, FinishReason
from engine.request import Request


class OutputStream:
    """Decides when a request is finished. A delta is made for the first token, for new text, and for the end."""

    __slots__ = ("_detokenizer", "_eos", "_max_model_len", "_request", "_started")

    def __init__(
        self, request: Request, tokenizer: Tokenizer, eos_token_ids: Sequence[int], max_model_len: int
    ) -> None:
        self._request = request
        self._eos = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._started = False
        self._detokenizer = IncrementalDetokenizer(tokenizer, stop=request.sampling.stop, skip_token_ids=self._eos)

    def push(self, token_id: int) -> Delta | None:
        """The request's newest token, already appended to it."""
        sampling, num_output = self._request.sampling, self._request.num_output_tokens
        may_stop = num_output > sampling.min_tokens
        if token_id in self._eos and may_stop and not sampling.ignore_eos:
            return self._finish("", FinishReason.STOP)
        text = self._detokenizer.push(token_id, honour_stop=may_stop)
        if self._detokenizer.stopped is not None:
            return self._finish(text, FinishReason.STOP)
        if num_output >= sampling.max_tokens or self._request.num_tokens >= self._max_model_len:
            return self._finish(text, FinishReason.LENGTH)
        return self._delta(text, None) if text or not self._started else None

    def _finish(self, text: str, reason: FinishReason) -> Delta:
        if self._detokenizer.stopped is None:
            text += self._detokenizer.flush()
        return self._delta(text, reason)

    def _delta(self, text: str, reason: FinishReason | None) -> Delta:
        first = not self._started
        self._started = True
        return Delta(
            request_id=self._request.request_id,
            text=text,
            num_output_tokens=self._request.num_output_tokens,
            account=self._request.account if first else None,
            document_order=self._request.document_order if first else None,
            finish_reason=reason,
        )
