"""What the cache holds of documents, in every tier, as one figure a document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.prefix_index import DocumentRun
from engine.protocol import DocumentUse


def document_uses(
    runs_by_tier: Mapping[str, Iterable[DocumentRun]], block_size: int, block_bytes: int
) -> tuple[DocumentUse, ...]:
    """A block that lies in two tiers is two blocks, and twice its bytes, as when it is erased."""
    found: dict[str, DocumentUse] = {}
    for tier, runs in runs_by_tier.items():
        for run in runs:
            before = found.get(run.document_id) or _unused(run.document_id)
            num_blocks = before.num_blocks + run.num_blocks
            found[run.document_id] = DocumentUse(
                document_id=run.document_id,
                num_blocks=num_blocks,
                num_bytes=num_blocks * block_bytes,
                num_by_tier={**before.num_by_tier, tier: before.num_by_tier.get(tier, 0) + run.num_blocks},
                hits=before.hits + run.hits,
                tokens_saved=before.tokens_saved + run.hits * run.num_blocks * block_size,
                last_use=max(before.last_use, run.last_use),
            )
    return tuple(found.values())


def _unused(document_id: str) -> DocumentUse:
    return DocumentUse(
        document_id=document_id, num_blocks=0, num_bytes=0, num_by_tier={}, hits=0, tokens_saved=0, last_use=0.0
    )
