"""From a setting to a model that is ready to serve, or to the sentence that says why not.

    "embedded" ┐                       ┌ checks on the configuration
    directory  ├─► ModelSource ──load──┤ weights (safetensors, or GGUF dequantized)   ──► LoadedModel
    .gguf file │   (local files)       │ trace, packing of linear layers, proof of paged attention
    hub id     ┘                       └ tokenizer, end-of-turn ids, fingerprint

Every source becomes local files first, so there is one way to load and one to digest. Code that comes with a model
is never run. Pickled weights are refused: opening them runs code too.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from engine.attention import ATTENTION_NAME, register_attention
from engine.embedded_model import EMBEDDED_MODEL_NAME, embedded_model_dir, split_digits
from engine.errors import ConfigError, ModelLoadError
from engine.fingerprint import digest_files, fingerprint
from engine.kv_cache import KVCacheLayout
from engine.kv_quantization import check_kv_dtype, choose_kv_dtype, measure_scales
from engine.load_progress import Progress, transformers_bars
from engine.model_checks import check_config, max_context, own_logits, relative_tolerance, trace_attention, verify_paged
from engine.packed_linear import pack_linears
from engine.settings import ModelSettings
from engine.sharding import Rank, shard_model
from kernels.dispatch import select_kernels

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_DIGIT_SPLITTING = "smollm"  # tokenizer.ggml.pre of a GGUF file whose digits stand alone


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode on its device, proved to be pageable, and all that the rest must know of it."""

    model: PreTrainedModel
    served_name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_full_attention: bool
    block_size: int  # the layout that the fingerprint is for
    max_model_len: int  # the model's own limit, in tokens
    vocab_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype  # of the KV cache's elements
    kv_scales: torch.Tensor | None  # fp32 [num_layers, 2, num_kv_heads], of elements in 8 bits
    device: torch.device
    eos_token_ids: tuple[int, ...]
    tokenizer_json: bytes
    chat_template: str
    special_tokens: dict[str, str]
    fingerprint: str
    logit_tolerance: float = math.inf  # what rounding leaves between two ways to compute a logit; inf: nobody looked

    @property
    def kv_layout(self) -> KVCacheLayout:
        return KVCacheLayout(self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, self.kv_dtype)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are on this machine."""

    directory: Path
    gguf: str | None  # the file's name in `directory`; None: safetensors
    name: str

    @property
    def weight_files(self) -> list[Path]:
        if self.gguf is not None:
            return [self.directory / self.gguf]
        return sorted(self.directory.glob("*.safetensors"))


def load_model(
    settings: ModelSettings,
    device: torch.device,
    data_dir: Path,
    progress: Progress,
    *,
    block_size: int,
    kv_cache_dtype: str = "auto",
    rank: Rank | None = None,
) -> LoadedModel:
    """Load, check and prove the model, or the share that `rank` has of it; `ModelLoadError` says why not."""
    source = find_source(settings, data_dir, progress)
    progress("reading the configuration", 0.0)
    config = _load_config(source)
    check_config(config)
    text = config.get_text_config(decoder=True)
    max_model_len = max_context(text)
    if max_model_len < text.max_position_embeddings:
        logger.warning("%s: longrope changes its keys beyond %d tokens; that is its limit", source.name, max_model_len)
    dtype = choose_dtype(settings.dtype, config, device)
    kv_dtype = choose_kv_dtype(kv_cache_dtype, dtype, device)
    tokenizer = _load_tokenizer(source)
    tokenizer_json = _tokenizer_json(tokenizer)
    # What several ranks share may be too large for any of them: it is cut before it leaves the host.
    model = _load_weights(source, config, dtype, device if rank is None else torch.device("cpu"), progress)
    progress("checking that the model can be paged", 0.0)
    facts = trace_attention(model)
    expected = own_logits(model)
    if rank is not None:
        shard_model(model, facts, rank)
        _move(model, device)
        facts, expected = trace_attention(model), expected.to(device)
    pack_linears(model)
    kernels = select_kernels(device)
    if kernels.max_head_dim is not None and facts.head_dim > kernels.max_head_dim:
        raise ModelLoadError(
            f"{source.name} has attention heads of {facts.head_dim} elements; the {kernels.name} kernels hold up to "
            f"{kernels.max_head_dim}, since a tile of wider ones does not fit into the registers: serve it on a CPU"
        )
    difference = verify_paged(model, facts, kernels, block_size, expected)
    logger.info("paged attention matches the model's own to %.1e in %s", difference, dtype)
    text_tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    kv_scales = measure_scales(model, facts, kernels, text_tokenizer, kv_dtype)
    tolerance = relative_tolerance(dtype)
    if kv_dtype != dtype:
        difference = check_kv_dtype(model, facts, kernels, text_tokenizer, kv_dtype, kv_scales)
        tolerance = max(tolerance, difference)
        logger.info("KV in %s changes the model's logits by %.1e of their size", kv_dtype, difference)
    weights_digest = digest_files(source.weight_files, progress)
    progress("model ready", 1.0)
    return LoadedModel(
        model=model,
        served_name=settings.served_name or source.name,
        num_layers=facts.num_layers,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        has_full_attention=facts.has_full_attention,
        block_size=block_size,
        max_model_len=max_model_len,
        vocab_size=text.vocab_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_scales=kv_scales,
        device=device,
        eos_token_ids=_eos_token_ids(model, text, tokenizer),
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(tokenizer, source),
        special_tokens=_special_tokens(tokenizer),
        fingerprint=fingerprint(
            weights_digest=weights_digest,
            config=config.to_dict(),
            rope_parameters=getattr(text, "rope_parameters", None),
            dtype=str(dtype),
            tokenizer_json=tokenizer_json,
            kv_layout=facts.layout(block_size, kv_dtype).describe(),
            kv_scales=b"" if kv_scales is None else kv_scales.cpu().numpy().tobytes(),
        ),
        logit_tolerance=tolerance * expected.square().mean().sqrt().item(),
    )


# ---------------------------------------------------------------- sources and dtypes


def find_source(settings: ModelSettings, data_dir: Path, progress: Progress) -> ModelSource:
    """Resolve `model.path` to local files; converts or downloads where that is needed."""
    if settings.path == "embedded":
        return ModelSource(embedded_model_dir(data_dir, progress), None, EMBEDDED_MODEL_NAME)
    path = Path(settings.path).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"model.path: there is no file {path}")
        return ModelSource(path.parent, path.name, path.stem)
    if path.is_dir():
        return _checked_directory(path, path.resolve().name)
    if path.is_absolute() or settings.path.startswith((".", "~")) or settings.path.count("/") > 1:
        raise ModelLoadError(f"model.path: there is no directory {path}")
    return _checked_directory(_download(settings, progress), settings.path)


def choose_dtype(wanted: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype to serve in. `auto`: the checkpoint's on a GPU; on a CPU bfloat16 where it has instructions for it."""
    if wanted in _DTYPES:
        return _DTYPES[wanted]
    if wanted != "auto":
        raise ConfigError(f"model.dtype = {wanted!r}; it is one of auto, {', '.join(_DTYPES)}", param="model.dtype")
    if device.type == "cpu":
        return torch.bfloat16 if _CPU_BF16_FLAGS & _cpu_flags() else torch.float32
    stored = config.dtype
    return stored if isinstance(stored, torch.dtype) and stored in _DTYPES.values() else torch.bfloat16


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def _checked_directory(directory: Path, name: str) -> ModelSource:
    source = ModelSource(directory, None, name)
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"{name}: no config.json in {directory}")
    if not source.weight_files:
        raise ModelLoadError(f"{name}: no *.safetensors in {directory}; other formats are not opened, convert them")
    return source


def _download(settings: ModelSettings, progress: Progress) -> Path:
    progress(f"fetching {settings.path}", 0.0)
    try:
        directory = snapshot_download(
            settings.path, revision=settings.revision or None, allow_patterns=_HUB_FILES, tqdm_class=None
        )
    except HFValidationError as error:
        raise ModelLoadError(
            f"model.path = {settings.path!r} is neither a file here nor a model's id on the hub: {error}"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelLoadError(
            f"{settings.path} is not in the Hugging Face cache and the hub cannot be reached; "
            "download it where there is a network, or set model.path to a local directory"
        ) from error
    except HfHubHTTPError as error:
        raise ModelLoadError(f"the hub refuses {settings.path}: {error}") from error
    return Path(directory)


# ---------------------------------------------------------------- configuration and weights


def _load_config(source: ModelSource) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(source.directory, **_gguf_argument(source), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{source.name}: {error}") from error


def _load_weights(
    source: ModelSource, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> PreTrainedModel:
    register_attention()
    arguments: dict[str, object] = {**_gguf_argument(source)}
    if source.gguf is not None:
        arguments["quantization_config"] = GgufConfig(dequantize=True)
    try:
        with transformers_bars(progress):
            # With `output_loading_info` it returns a pair, which its annotation does not say.
            loaded: object = AutoModelForCausalLM.from_pretrained(
                source.directory,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                output_loading_info=True,
                **arguments,
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelLoadError(f"{source.name}: {error}") from error
    assert isinstance(loaded, tuple)
    model, info = loaded
    assert isinstance(model, PreTrainedModel)
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:  # transformers would fill them with random numbers and a warning
        raise ModelLoadError(f"{source.name}: weights are absent or of another shape: {', '.join(absent[:5])}")
    _move(model, device)
    return model.eval()


def _move(model: PreTrainedModel, device: torch.device) -> None:
    try:
        torch.nn.Module.to(model, device)  # PreTrainedModel's own `to` adds only checks for quantized weights
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(f"{type(model).__name__} does not fit into the memory of {device}") from error


def _gguf_argument(source: ModelSource) -> dict[str, str]:
    return {} if source.gguf is None else {"gguf_file": source.gguf}


# ---------------------------------------------------------------- tokenizer


def _load_tokenizer(source: ModelSource) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.directory, **_gguf_argument(source), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{source.name}: its tokenizer cannot be loaded: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelLoadError(f"{source.name}: its tokenizer has no tokenizer.json form")
    if source.gguf is not None and _gguf_pre_tokenizer(source.directory / source.gguf) == _DIGIT_SPLITTING:
        split_digits(tokenizer.backend_tokenizer)
    return tokenizer


def _gguf_pre_tokenizer(path: Path) -> str | None:
    # Here, because only a GGUF file needs its reader.
    from gguf import GGUFReader

    entry = GGUFReader(path).get_field("tokenizer.ggml.pre")
    return None if entry is None else str(entry.contents())


def _tokenizer_json(tokenizer: PreTrainedTokenizerFast) -> bytes:
    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_truncation()  # a prompt is never cut without being asked
    copy.no_padding()
    return copy.to_str().encode()


def _chat_template(tokenizer: PreTrainedTokenizerBase, source: ModelSource) -> str:
    template: str | dict[str, str] | None = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ModelLoadError(f"{source.name} has no chat template; put one into its directory as chat_template.jinja")
    return template


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    return {name: str(token) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}


def _eos_token_ids(
    model: PreTrainedModel, text: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Every end that any of the three names: chat models often end turns with a token their config does not name."""
    generation = model.generation_config
    stated = [generation.eos_token_id if generation else None, text.eos_token_id, tokenizer.eos_token_id]
    ids: set[int] = set()
    for value in stated:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    if not ids:
        raise ModelLoadError(f"{type(model).__name__} names no end-of-turn token; its answers would never end")
    return tuple(sorted(ids))
