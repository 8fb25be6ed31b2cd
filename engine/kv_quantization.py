"""KV in another type than the model's: which one, with which scales for 8 bits, and what it does to the answers.

    built-in text, first part ──► model over KV of its own type ──► largest |key|, |value| of each layer and head
                                                                         │  a scale each: rounded up, and then fixed
    built-in text, second part ─► model over KV of either type ──► how far the logits differ: logged, or a refusal

Scales are measured once, when the model is loaded, and part of its fingerprint: KV that was written with other scales
is never read. They are rounded up, fp8's to powers of two, int8's to eighths of an octave, so that what another number
of threads changes in the last bits of a measurement mostly changes no scale. (If it does, the cache begins anew.)

fp8 has the same relative precision over 15 octaves, so there is room for values twice as large as any that were seen.
int8 has the same absolute one, and loses by any room; what is larger than all that was seen is stored as the largest.

Measured on the default model in fp32, over 3,000 tokens of prose and code: fp8 changes 6% of the greedy tokens (mean
KL divergence 0.009), int8 3% (0.003); with a half more room 4% (0.006), with powers of two 4% (0.005).

Rejected: scales of 1 for fp8, as other engines have them without a calibrated checkpoint. They do as well here (0.009),
but a key beyond 448 is cut, and a head of values below 2^-6 loses what makes it a float.
"""

from __future__ import annotations

import math

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from engine.attention import AttentionCall, AttentionContext, PagedAttention, forward_packed
from engine.errors import ConfigError, ModelLoadError
from engine.kv_cache import allocate_kv_cache
from engine.model_checks import AttentionFacts
from kernels.dispatch import LARGEST_ELEMENT, AttentionKernels, select_kernels, why_not_kv_dtype
from kernels.metadata import AttentionMetadata

KV_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_FP8_ROOM = 2.0  # times the largest value that was seen
_INT8_STEPS = 10  # scales an octave
_MAX_TOKENS = 512
# Root mean square difference of the logits over their root mean square. The default model's is 0.03 in 8 bits; random
# logits are at 1.4.
_TOLERANCE = 0.5

# What a model is asked to read: prose, a dialogue, code, data, numbers, other scripts.
_MEASURED_TEXT = """\
The harbour was quiet when the last boat came in. Nobody had expected it before morning, and the two men on the \
pier, who had been talking about the price of fish, stopped and looked up. "You are late," said the older one. "We are \
alive," the captain answered, and threw him the rope. Of the 24 crates 17 were empty; the rest held ice, 3.5 kg of cod \
each, and one a letter dated 12 June 1987.

Question: What is the capital of France, and how many people live there?
Answer: Paris. About 2.1 million people live in the city itself, and more than 12 million in the region around it.

def area(width: float, height: float) -> float:
    if width < 0 or height < 0:
        raise ValueError(f"no rectangle of {width} by {height}")
    return width * height

{"id": 42, "name": "Ada", "tags": ["first", "second"], "active": true, "score": -0.25}

| year | revenue | change |
|---|---|---|
| 2021 | 1,204,330 | +4.1% |
| 2022 | 1,187,002 | -1.4% |

1. Was kostet das? 2. Où est la gare? 3. ¿Dónde está la biblioteca? 4. 東京の天気は晴れです。 5. Где находится музей?
SELECT name, COUNT(*) FROM orders WHERE total >= 100 GROUP BY name; -- x^2 + y^2 = r^2, so r = sqrt(x*x + y*y)
"""
_CHECKED_TEXT = """\
Water boils at 100 degrees Celsius at sea level, and at lower temperatures higher up, because the pressure of the air \
is lower there. On a mountain of 3,000 metres it boils at about 90 degrees: potatoes take longer, and tea tastes flat.

for line in open("measurements.csv"):
    place, height, degrees = line.rstrip().split(",")
    print(f"{place:20} {int(height):5d} m {float(degrees):5.1f}")

Question: Why do potatoes take longer on a mountain?
Answer: Because the water that they are cooked in is not as hot.
"""


def choose_kv_dtype(wanted: str, model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of KV elements; `auto` is the model's own. Raises ConfigError for one that the device cannot keep."""
    dtype = KV_DTYPES.get(wanted, model_dtype)
    reason = why_not_kv_dtype(device, model_dtype, dtype)
    if reason is not None:
        raise ConfigError(f"engine.kv_cache_dtype = {wanted!r}: {reason}", param="engine.kv_cache_dtype")
    return dtype


def measure_scales(
    model: PreTrainedModel,
    facts: AttentionFacts,
    kernels: AttentionKernels,
    tokenizer: Tokenizer,
    kv_dtype: torch.dtype,
) -> torch.Tensor | None:
    """fp32 [num_layers, 2, num_kv_heads] on the model's device; None for elements that need none."""
    if kv_dtype not in LARGEST_ELEMENT:
        return None
    trace = _SizeTrace(facts, model.device)
    _read(model, facts, kernels, _token_ids(tokenizer, _MEASURED_TEXT, model), model.dtype, trace)
    sizes = trace.sizes.cpu()
    if not bool(torch.isfinite(sizes).all()):
        raise ModelLoadError(f"{type(model).__name__} computes keys or values that are not finite: no scale holds them")
    return scales_for(sizes, kv_dtype).to(model.device)


def scales_for(sizes: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """`sizes`: the largest absolute values. A head that is always zero has the scale 1.

    Rounded up to numbers of bf16, which some kernels multiply in: what is read has the scale that was written with.
    """
    steps, room = (_INT8_STEPS, 1.0) if kv_dtype == torch.int8 else (1, _FP8_ROOM)
    wanted = sizes.double() * room / LARGEST_ELEMENT[kv_dtype]
    rounded = torch.exp2(torch.ceil(torch.log2(wanted) * steps) / steps)
    bits = torch.where(sizes > 0, rounded, 1.0).float().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)  # bf16 is the upper half of fp32


def check_kv_dtype(
    model: PreTrainedModel,
    facts: AttentionFacts,
    kernels: AttentionKernels,
    tokenizer: Tokenizer,
    kv_dtype: torch.dtype,
    kv_scales: torch.Tensor | None,
) -> float:
    """How far the logits over KV of that type are from those over the model's own; a refusal where that is too far."""
    token_ids = _token_ids(tokenizer, _CHECKED_TEXT, model)
    expected = _read(model, facts, kernels, token_ids, model.dtype)
    other = select_kernels(model.device, kernels.name, kv_scales=kv_scales)
    actual = _read(model, facts, other, token_ids, kv_dtype)
    difference = ((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()
    if not difference <= _TOLERANCE:  # so that a NaN is refused too
        raise ConfigError(
            f"engine.kv_cache_dtype: with KV in {kv_dtype} the logits of {type(model).__name__} differ by "
            f"{difference:.2g} of their size from those over its own {model.dtype}, and more than {_TOLERANCE} is not "
            "the same model any more: take another type, or auto",
            param="engine.kv_cache_dtype",
        )
    return difference


class _SizeTrace:
    """Attention as it is, with a look at the size of every key and value."""

    def __init__(self, facts: AttentionFacts, device: torch.device) -> None:
        self.sizes = torch.zeros(facts.num_layers, 2, facts.num_kv_heads, device=device)
        self.inner: AttentionContext | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        assert self.inner is not None
        for part, rows in enumerate((call.key, call.value)):
            self.sizes[call.layer, part] = rows.abs().amax((0, 2)).float()
        return self.inner.attend(call)


def _token_ids(tokenizer: Tokenizer, text: str, model: PreTrainedModel) -> list[int]:
    """With what the model expects to stand first: the first token's keys are often the largest."""
    config = model.config.get_text_config(decoder=True)
    limit = min(_MAX_TOKENS, config.max_position_embeddings)
    token_ids = [token for token in tokenizer.encode(text).ids if token < config.vocab_size][:limit]
    if not token_ids:
        raise ModelLoadError(f"the tokenizer of {type(model).__name__} makes no tokens of plain text")
    return token_ids


def _read(
    model: PreTrainedModel,
    facts: AttentionFacts,
    kernels: AttentionKernels,
    token_ids: list[int],
    kv_dtype: torch.dtype,
    trace: _SizeTrace | None = None,
) -> torch.Tensor:
    """The logits of all tokens, fp32 [num_tokens, V], in one step over a cache of their own."""
    device, block_size = model.device, 16
    num_blocks = math.ceil(len(token_ids) / block_size)
    kv_cache = allocate_kv_cache(facts.layout(block_size, kv_dtype), num_blocks, device)
    metadata = AttentionMetadata.build([range(num_blocks)], [0], [len(token_ids)], block_size, device)
    context: AttentionContext = PagedAttention(kv_cache, kernels, metadata)
    if trace is not None:
        trace.inner, context = context, trace
    rows = torch.arange(len(token_ids), device=device)
    with torch.inference_mode():
        return forward_packed(model, torch.tensor(token_ids, device=device), rows, context, rows).float()
