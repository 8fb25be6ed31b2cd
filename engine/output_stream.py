"""From the tokens of one request to the deltas its client sees, and the reason it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from engine.batch import TokenLogprobs
from engine.detokenizer import IncrementalDetokenizer, special_token_ids
from engine.protocol import Delta, DrawnToken, EngineInfo, FinishReason, TokenLogprob
from engine.request import Request


class OutputRules:
    """What holds for the output of every request of a model."""

    __slots__ = ("end_token_ids", "hidden_token_ids", "max_model_len", "tokenizer")

    def __init__(self, info: EngineInfo) -> None:
        """Raises `ModelLoadError` when the tokenizer's decoder cannot be followed token by token."""
        self.tokenizer = Tokenizer.from_str(info.tokenizer_json.decode())
        self.end_token_ids = frozenset(info.eos_token_ids)
        self.hidden_token_ids = special_token_ids(self.tokenizer) | self.end_token_ids  # they mark, and are no text
        self.max_model_len = info.max_model_len
        self.detokenizer(())

    def detokenizer(self, stop: Sequence[str]) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.tokenizer, stop=stop, skip_token_ids=self.hidden_token_ids)


class OutputStream:
    """Decides when a request is finished. A delta is made for the first token, for new text, and for the end."""

    __slots__ = ("_detokenizer", "_drawn", "_num_sent", "_request", "_rules", "_started")

    def __init__(self, request: Request, rules: OutputRules) -> None:
        self._request = request
        self._rules = rules
        self._started = False
        self._detokenizer = rules.detokenizer(request.sampling.stop)
        self._num_sent = 0  # characters
        self._drawn: deque[tuple[int, DrawnToken]] = deque()  # not sent yet, and where its text begins

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> Delta | None:
        """The request's newest token, already appended to it."""
        sampling, num_output = self._request.sampling, self._request.num_output_tokens
        may_stop = num_output > sampling.min_tokens
        if token_id in self._rules.end_token_ids and may_stop and not sampling.ignore_eos:
            return self._finish("", FinishReason.STOP)
        if logprobs is not None:
            self._drawn.append((self._num_sent + self._detokenizer.num_held, self._drawn_token(token_id, logprobs)))
        text = self._detokenizer.push(token_id, honour_stop=may_stop)
        if self._detokenizer.stopped is not None:
            return self._finish(text, FinishReason.STOP)
        if num_output >= sampling.max_tokens or self._request.num_tokens >= self._rules.max_model_len:
            return self._finish(text, FinishReason.LENGTH)
        return self._delta(text, None) if text or not self._started else None

    def _finish(self, text: str, reason: FinishReason) -> Delta:
        if self._detokenizer.stopped is None:
            text += self._detokenizer.flush()
        return self._delta(text, reason)

    def _delta(self, text: str, reason: FinishReason | None) -> Delta:
        first = not self._started
        self._started = True
        self._num_sent += len(text)
        return Delta(
            request_id=self._request.request_id,
            text=text,
            num_output_tokens=self._request.num_output_tokens,
            tokens=tuple(self._take_drawn(is_last=reason is not None)),
            account=self._request.account if first else None,
            document_order=self._request.document_order if first else None,
            finish_reason=reason,
        )

    def _take_drawn(self, *, is_last: bool) -> Iterator[DrawnToken]:
        """Tokens whose text has begun to come out; in the end the others, too, but for what a stop string cut off."""
        is_whole = is_last and self._detokenizer.stopped is None
        while self._drawn and (is_whole or self._drawn[0][0] < self._num_sent):
            yield self._drawn.popleft()[1]

    def _drawn_token(self, token_id: int, logprobs: TokenLogprobs) -> DrawnToken:
        spell = self._detokenizer.spell
        top = tuple(TokenLogprob(spell(each), logprob) for each, logprob in logprobs.top)
        return DrawnToken(spell(token_id), logprobs.logprob, top)
