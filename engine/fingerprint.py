"""The model fingerprint: KV computed under one fingerprint is never read under another.

    xxh3_128( format · weights digest · configuration · RoPE parameters · dtype · tokenizer · KV layout · KV scales )

Each part is hashed with its name and length, so that no two lists of parts run together into the same bytes.
The weights are digested by content, not by file name or time: the same name with other weights is another model, and
a copy of the same files is the same. xxh3 reads at memory speed; a file is mapped, not loaded.
"""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import xxhash

from engine.load_progress import Progress

FORMAT_VERSION = 1  # of stored KV: raise it when its meaning changes in a way that no other part shows
_CHUNK = 16 << 20
# Where the configuration came from and who wrote it say nothing about the KV.
_VOLATILE_KEYS = {"_name_or_path", "transformers_version", "_attn_implementation_autoset", "use_cache"}


def fingerprint(
    *,
    weights_digest: str,
    config: dict[str, object],
    rope_parameters: object,
    dtype: str,
    tokenizer_json: bytes,
    kv_layout: str,
    kv_scales: bytes = b"",  # of KV in 8 bits
    format_version: int = FORMAT_VERSION,
) -> str:
    """32 hexadecimal digits; another value of any argument gives another."""
    stable = {key: value for key, value in config.items() if key not in _VOLATILE_KEYS}
    parts = {
        "format": str(format_version).encode(),
        "weights": weights_digest.encode(),
        "config": _canonical(stable),
        "rope": _canonical(rope_parameters),
        "dtype": dtype.encode(),
        "tokenizer": tokenizer_json,
        "kv_layout": kv_layout.encode(),
    }
    if kv_scales:
        parts["kv_scales"] = kv_scales
    digest = xxhash.xxh3_128()
    for name, content in parts.items():
        digest.update(f"{name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def digest_files(files: list[Path], progress: Progress) -> str:
    """A digest of the contents of `files`, in the order of their names."""
    digest = xxhash.xxh3_128()
    total = sum(file.stat().st_size for file in files)
    done = 0
    for file in sorted(files, key=lambda path: path.name):
        size = file.stat().st_size
        digest.update(f"{size}:".encode())
        if not size:
            continue
        with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for start in range(0, size, _CHUNK):
                digest.update(memoryview(content)[start : start + _CHUNK])
                done += min(_CHUNK, size - start)
                progress("digesting the weights", done / total)
    return digest.hexdigest()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
