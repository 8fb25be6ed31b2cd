"""Names of the keys in Redis; docs/operations.md lists them. Every name but the first few begins with its tenant."""

from __future__ import annotations

EVENTS = "rg:retrieval:events"
ALL_COLLECTIONS = "rg:retrieval:collections"
JOBS = "rg:retrieval:jobs"
ATTEMPTS = "rg:retrieval:attempts"

SEPARATOR = "\x1f"  # between the parts of a member's name; no id has it


def files(tenant: str) -> str:
    return f"rg:{tenant}:files"


def file(tenant: str, file_id: str) -> str:
    return f"rg:{tenant}:file:{file_id}"


def file_bytes(tenant: str, file_id: str) -> str:
    return f"rg:{tenant}:file:{file_id}:bytes"


def file_collections(tenant: str, file_id: str) -> str:
    return f"rg:{tenant}:file:{file_id}:collections"


def collections(tenant: str) -> str:
    return f"rg:{tenant}:collections"


def collection(tenant: str, collection_id: str) -> str:
    return f"rg:{tenant}:collection:{collection_id}"


def members(tenant: str, collection_id: str) -> str:
    return f"rg:{tenant}:collection:{collection_id}:files"


def batches(tenant: str, collection_id: str) -> str:
    return f"rg:{tenant}:collection:{collection_id}:batches"


def version(tenant: str, collection_id: str) -> str:
    return f"rg:{tenant}:collection:{collection_id}:version"


def held_chunks(tenant: str, collection_id: str, file_id: str) -> str:
    return f"rg:{tenant}:collection:{collection_id}:chunks:{file_id}"


def chunk_prefix(tenant: str) -> str:
    return f"rg:{tenant}:chunk:"


def chunk(tenant: str, chunk_id: str) -> str:
    return f"{chunk_prefix(tenant)}{chunk_id}"


def popularity(tenant: str) -> str:
    return f"rg:{tenant}:popularity"


def pinned(tenant: str) -> str:
    return f"rg:{tenant}:pinned"


def conversation(tenant: str, digest: str) -> str:
    return f"rg:{tenant}:conversation:{digest}"
