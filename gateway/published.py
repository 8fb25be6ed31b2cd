"""The texts that the operator has published: their KV is everybody's, because their text is.

A system prompt is public when it *is* a published text, by its id or word for word; a document when its rendering
is one of a published collection. What stands after the first private token is private, whatever it says
(`gateway/prompt_scopes.py`).
"""

from __future__ import annotations

import hashlib
from collections import Counter

from gateway.tenant_records import CollectionRecord, PromptRecord
from retrieval.documents import Document, render


class Published:
    """Digests are counted: a text that was published twice is public until both are withdrawn."""

    def __init__(self) -> None:
        self.prompts: dict[str, PromptRecord] = {}
        self.collections: dict[str, CollectionRecord] = {}
        self._prompt_digests: Counter[str] = Counter()
        self._document_digests: Counter[str] = Counter()

    def is_public_prompt(self, text: str) -> bool:
        return bool(self._prompt_digests) and text_digest(text) in self._prompt_digests

    def is_public_document(self, document: Document) -> bool:
        return bool(self._document_digests) and document_digest(document) in self._document_digests

    def put_prompt(self, record: PromptRecord) -> None:
        self.drop_prompt(record.id)
        self.prompts[record.id] = record
        self._prompt_digests[text_digest(record.text)] += 1

    def drop_prompt(self, prompt_id: str) -> None:
        gone = self.prompts.pop(prompt_id, None)
        if gone is not None:
            self._prompt_digests -= Counter([text_digest(gone.text)])

    def put_collection(self, record: CollectionRecord) -> None:
        self.drop_collection(record.id)
        self.collections[record.id] = record
        self._document_digests.update(record.documents)

    def drop_collection(self, collection_id: str) -> None:
        gone = self.collections.pop(collection_id, None)
        if gone is not None:
            self._document_digests -= Counter(gone.documents)


def text_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def document_digest(document: Document) -> str:
    """Of the text that the model reads: a private document cannot pass for a public one by its id."""
    return text_digest(render(document))
