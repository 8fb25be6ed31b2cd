"""What the model did for a request: where its prompt tokens came from, and how many tokens it generated.

An answer has one `ModelUse`, over all of its prompts and choices; the rewriting of its query has another. What the
request used is their sum: that is what limits, usage, metrics, history and logs count.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.protocol import Delta, PromptAccount

_NO_TOKENS = PromptAccount()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    account: PromptAccount = _NO_TOKENS
    num_output_tokens: int = 0
    seconds_saved: float = 0.0  # of prefill, as the engine has measured itself

    def __add__(self, other: ModelUse) -> ModelUse:
        return ModelUse(
            account=sum_of_accounts(self.account, other.account),
            num_output_tokens=self.num_output_tokens + other.num_output_tokens,
            seconds_saved=self.seconds_saved + other.seconds_saved,
        )

    def noting(self, delta: Delta) -> ModelUse:
        """Of one engine request, after one more of its deltas."""
        return ModelUse(
            account=delta.account or self.account,
            num_output_tokens=delta.num_output_tokens,
            seconds_saved=delta.seconds_saved or self.seconds_saved,
        )


def sum_of_accounts(*accounts: PromptAccount) -> PromptAccount:
    classes = [msgspec.structs.asdict(account) for account in accounts]
    return PromptAccount(**{name: sum(each[name] for each in classes) for name in PromptAccount.__struct_fields__})
