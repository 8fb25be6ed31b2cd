"""How a transformers model's attention reaches the paged KV cache.

    model(input_ids [1, T], position_ids [1, T], paged=CONTEXT)        one packed row: all sequences of the step
      └─ layer i: attention(query, key, value, …, paged=CONTEXT)       transformers hands keyword arguments down
           └─ CONTEXT.attend(AttentionCall)                            store the new KV, attend over the blocks

`AttentionInterface` picks the function by name; the step's own state comes as the keyword argument `paged`, so that
nothing global is set before a step and forgotten after it. There are two contexts: `PagedAttention` computes,
and `engine.model_checks.AttentionTrace` only looks at what a model asks for, at load.

The name is not registered with `AttentionMaskInterface`: for such a name transformers builds no mask at all, which is
what we want. A function that returns None would be called only after transformers had searched the packed
positions for sequence ends, on every step. Causality, windows and sequence ends are the kernels' business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from engine.errors import ModelLoadError
from kernels.dispatch import AttentionKernels
from kernels.metadata import AttentionMetadata

ATTENTION_NAME = "radixgate_paged"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks of its attention."""

    module: nn.Module
    layer: int
    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    key: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor  # [num_tokens, num_kv_heads, head_dim]
    attention_mask: torch.Tensor | None
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None  # [num_heads]
    others: dict[str, object]  # keyword arguments that paged attention has no meaning for


class AttentionContext(Protocol):
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output, [num_tokens, num_heads, head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """One step's attention: the same for every layer of it."""

    kv_cache: torch.Tensor  # [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]
    kernels: AttentionKernels
    metadata: AttentionMetadata

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.kernels.store_kv(call.key, call.value, self.kv_cache, call.layer, self.metadata.slot_mapping)
        return self.kernels.paged_attention(
            call.query,
            self.kv_cache,
            call.layer,
            self.metadata,
            scale=call.scale,
            sliding_window=call.sliding_window,
            soft_cap=call.soft_cap,
            sinks=call.sinks,
        )


def _attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: AttentionContext | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    if paged is None:
        raise ModelLoadError("the model does not hand keyword arguments on to its attention layers")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelLoadError(f"{type(module).__name__} has no layer_idx: its place in the KV cache is unknown")
    output = paged.attend(
        AttentionCall(
            module=module,
            layer=layer,
            query=query[0].transpose(0, 1),
            key=key[0].transpose(0, 1),
            value=value[0].transpose(0, 1),
            attention_mask=attention_mask,
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            sliding_window=sliding_window,
            soft_cap=softcap,
            sinks=s_aux,
            others=others,
        )
    )
    return output.unsqueeze(0), None


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers. Registering again is harmless."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


def forward_packed(
    model: PreTrainedModel,
    input_ids: torch.Tensor,  # [num_tokens]
    position_ids: torch.Tensor,  # [num_tokens]
    context: AttentionContext,
    logits_rows: torch.Tensor,  # [num_rows] indices into the packed tokens
) -> torch.Tensor:
    """One forward pass over the packed tokens of a step; logits, [num_rows, vocab_size], of the given rows only."""
    output = model(
        input_ids=input_ids.unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        use_cache=False,
        logits_to_keep=logits_rows,
        paged=context,
    )
    logits = output.logits
    assert isinstance(logits, torch.Tensor)
    return logits[0]
