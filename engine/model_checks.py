"""Whether a model can be paged exactly: what cannot is refused at load, with the reason.

    check_config      the configuration alone: before any weight is read
    trace_attention   one forward of two tokens that records what each layer asks of its attention; the shape of the
                      KV cache is taken from here, not guessed from differently named configuration fields
    verify_paged      the proof: two packed sequences in chunks over shuffled blocks, against the model's own attention

The first two give the better sentence. The third catches what nobody thought of: a convolution, a recurrent state,
a position taken from the row instead of `position_ids` - anything that lets tokens meet outside our attention.
It cannot see a window longer than its prompts, so the windows are checked against the configuration.

A list of known model names was rejected: it refuses what works and lets through what a new version changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention import ATTENTION_NAME, AttentionCall, PagedAttention, forward_packed, register_attention
from engine.errors import ModelLoadError
from engine.kv_cache import KVCacheLayout, allocate_kv_cache
from kernels.dispatch import AttentionKernels
from kernels.metadata import AttentionMetadata

_PAGEABLE_LAYERS = {"full_attention", "sliding_attention"}
# Arguments that repeat what the packed row already says, for attention functions that need it said again.
_REDUNDANT_ARGUMENTS = {"position_ids", "position_embeddings", "cache_position"}
# Root mean square difference of the logits over their root mean square. Wrong attention gives 0.1 and more.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
_PROOF_LENGTHS = (40, 23)
_PROOF_CUTS = (25, 11)  # where each proof prompt is cut in two; not at a block's edge


# ---------------------------------------------------------------- the configuration


def check_config(config: PreTrainedConfig) -> None:
    """Refuse what the configuration already tells to be impossible."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelLoadError(f"{config.model_type} is an encoder-decoder; only decoder-only models can be served")
    text = config.get_text_config(decoder=True)
    unpageable = sorted(set(_layer_types(text)) - _PAGEABLE_LAYERS)
    if unpageable:
        raise ModelLoadError(
            f"{config.model_type} has layers of type {', '.join(unpageable)}, whose state is not a key and a value "
            "per token: it cannot be cut into blocks and shared"
        )
    if getattr(text, "attention_chunk_size", None):
        raise ModelLoadError(f"{config.model_type} uses chunked attention, which is not a causal window")
    if getattr(text, "num_kv_shared_layers", None):
        raise ModelLoadError(f"{config.model_type} shares keys and values between layers; its layers have no own KV")
    if getattr(text, "use_bidirectional_attention", False):
        raise ModelLoadError(f"{config.model_type} attends to later tokens: a prefix's KV would depend on what follows")
    for parameters in rope_parameter_sets(text):
        if parameters.get("rope_type") == "dynamic":
            raise ModelLoadError(
                f"{config.model_type} uses rope_type 'dynamic': keys change with the length of the sequence, so cached "
                "keys would be wrong in a longer one"
            )


def rope_parameter_sets(text: PreTrainedConfig) -> list[dict[str, object]]:
    """The RoPE parameters: one set, or one per layer type."""
    parameters: dict[str, object] = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def max_context(text: PreTrainedConfig) -> int:
    """The longest sequence, in tokens, whose cached keys stay right."""
    limit: int | None = getattr(text, "max_position_embeddings", None)
    if limit is None:
        raise ModelLoadError(f"{text.model_type} does not say how long a sequence may be (max_position_embeddings)")
    for parameters in rope_parameter_sets(text):
        original = parameters.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if parameters.get("rope_type") == "longrope" and isinstance(original, int):
            # Beyond, every key is rotated by other factors, those before the boundary too.
            limit = min(limit, original)
    return limit


def _layer_types(text: PreTrainedConfig) -> list[str]:
    return list(getattr(text, "layer_types", None) or [])


# ---------------------------------------------------------------- what the layers ask for


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_full_attention: bool  # in some layer: one without a window

    def layout(self, block_size: int, dtype: torch.dtype) -> KVCacheLayout:
        return KVCacheLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype)


@dataclass(slots=True)
class AttentionTrace:
    """An attention context that computes nothing and remembers every call."""

    calls: list[AttentionCall] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return call.query.new_zeros(call.query.shape[0], call.query.shape[1], call.value.shape[2])


def trace_attention(model: PreTrainedModel) -> AttentionFacts:
    """Run two tokens through the model and refuse what paged attention cannot do; the facts of all its layers."""
    name = type(model).__name__
    # Not public, but transformers' own generation asks the same question to refuse such models.
    if model._is_stateful:
        raise ModelLoadError(f"{name} keeps a recurrent state instead of keys and values; there is nothing to page")
    _use_attention(model, ATTENTION_NAME)
    trace = AttentionTrace()
    tokens = torch.zeros(2, dtype=torch.long, device=model.device)
    positions = torch.arange(2, device=model.device)
    try:
        with torch.inference_mode():
            forward_packed(model, tokens, positions, trace, positions[-1:])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"{name} cannot run a step of packed tokens: {error}") from error
    text = model.config.get_text_config(decoder=True)
    if [call.layer for call in trace.calls] != list(range(text.num_hidden_layers)):
        raise ModelLoadError(
            f"{name} has {text.num_hidden_layers} layers, but attention was reached in layers "
            f"{[call.layer for call in trace.calls]}: what the others keep between tokens cannot be paged"
        )
    for call, window in zip(trace.calls, _expected_windows(text), strict=True):
        _check_call(name, call, window)
    return _common_facts(name, trace.calls)


def _expected_windows(text: PreTrainedConfig) -> list[int | None]:
    window: int | None = getattr(text, "sliding_window", None)
    types = _layer_types(text) or ["sliding_attention"] * text.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def _check_call(name: str, call: AttentionCall, window: int | None) -> None:
    where = f"layer {call.layer} of {name}"
    if call.key.shape != call.value.shape or call.query.shape[2] != call.key.shape[2]:
        raise ModelLoadError(
            f"{where} has keys of {tuple(call.key.shape[1:])} and values of {tuple(call.value.shape[1:])} (heads, size)"
            "; paged blocks need them alike"
        )
    if call.attention_mask is not None:
        raise ModelLoadError(f"{where} builds an attention mask of its own, which paged attention cannot follow")
    if call.sliding_window != window:
        raise ModelLoadError(
            f"{where} asks for a window of {call.sliding_window} tokens, its configuration says {window}: "
            "the difference cannot be proved harmless"
        )
    if call.others.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        raise ModelLoadError(f"{where} is not causal: a prefix's KV would depend on what follows")
    for key, value in call.others.items():
        if key in _REDUNDANT_ARGUMENTS or key == "is_causal" or value is None or value is False or key == "dropout":
            continue
        raise ModelLoadError(f"{where} passes {key!r} to its attention, which paged attention has no meaning for")


def _common_facts(name: str, calls: list[AttentionCall]) -> AttentionFacts:
    shapes = {(call.query.shape[1], call.key.shape[1], call.key.shape[2]) for call in calls}
    if len(shapes) != 1:
        raise ModelLoadError(
            f"the layers of {name} differ in (heads, KV heads, head size): {sorted(shapes)}; blocks need one shape"
        )
    ((num_heads, num_kv_heads, head_dim),) = shapes
    has_full_attention = any(call.sliding_window is None for call in calls)
    return AttentionFacts(len(calls), num_heads, num_kv_heads, head_dim, has_full_attention)


def _use_attention(model: PreTrainedModel, name: str) -> None:
    register_attention()
    if not model._supports_attention_backend:
        raise ModelLoadError(
            f"{type(model).__name__} does not let its attention be replaced (no AttentionInterface support)"
        )
    model.set_attn_implementation(name)


# ---------------------------------------------------------------- the proof


def own_logits(model: PreTrainedModel) -> torch.Tensor:
    """What the model says to the proof's prompts, each alone and in one go, by its own attention; [num_tokens, V]."""
    _use_attention(model, "eager")
    try:
        with torch.inference_mode():
            return torch.cat(
                [
                    model(input_ids=torch.tensor([prompt], device=model.device), use_cache=False).logits[0].float()
                    for prompt in _proof_prompts(model)
                ]
            )
    finally:
        _use_attention(model, ATTENTION_NAME)


def relative_tolerance(dtype: torch.dtype) -> float:
    """What rounding explains between two ways to compute the logits, of their root mean square."""
    return _TOLERANCE[dtype]


def verify_paged(
    model: PreTrainedModel,
    facts: AttentionFacts,
    kernels: AttentionKernels,
    block_size: int,
    expected: torch.Tensor,  # `own_logits`, taken before anything in the model was replaced
) -> float:
    """The relative difference of the paged logits from the expected ones, or the refusal where it is too large."""
    with torch.inference_mode():
        paged = _paged_logits(model, facts, kernels, block_size, _proof_prompts(model))
    # Written so that a NaN is refused too.
    difference = ((paged - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()
    tolerance = relative_tolerance(model.dtype)
    if not difference <= tolerance:
        raise ModelLoadError(
            f"{type(model).__name__} cannot be paged exactly: its logits over KV blocks differ from those of its own "
            f"attention by {difference:.2g} of their size, where rounding in {model.dtype} explains {tolerance:.2g}"
        )
    return difference


def _proof_prompts(model: PreTrainedModel) -> list[list[int]]:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in _PROOF_LENGTHS]


def _paged_logits(
    model: PreTrainedModel,
    facts: AttentionFacts,
    kernels: AttentionKernels,
    block_size: int,
    prompts: list[list[int]],
) -> torch.Tensor:
    """Logits of all tokens, prompt after prompt: two steps, each with a part of every prompt."""
    counts = [-(-len(prompt) // block_size) for prompt in prompts]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    block_tables = [order[: counts[0]], order[counts[0] :]]
    kv_cache = allocate_kv_cache(facts.layout(block_size, model.dtype), sum(counts), model.device)
    kv_cache.fill_(float("nan"))  # what is read before it was written shows
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    for starts, ends in (([0, 0], list(_PROOF_CUTS)), (list(_PROOF_CUTS), list(_PROOF_LENGTHS))):
        num_new = [end - start for start, end in zip(starts, ends, strict=True)]
        tokens = [token for prompt, a, b in zip(prompts, starts, ends, strict=True) for token in prompt[a:b]]
        positions = [position for a, b in zip(starts, ends, strict=True) for position in range(a, b)]
        metadata = AttentionMetadata.build(block_tables, starts, num_new, block_size, model.device)
        logits = forward_packed(
            model,
            torch.tensor(tokens, device=model.device),
            torch.tensor(positions, device=model.device),
            PagedAttention(kv_cache, kernels, metadata),
            torch.arange(len(tokens), device=model.device),
        )
        for part, piece in zip(parts, logits.float().split(num_new), strict=True):
            part.append(piece)
    return torch.cat([piece for part in parts for piece in part])
