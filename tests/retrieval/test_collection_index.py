"""A collection's files under filters, against trying the filter on each of them."""

from __future__ import annotations

import random

import numpy as np

from retrieval.collection_index import CollectionIndex
from retrieval.filters import compile_filter
from retrieval.records import Attributes, Chunk, Chunking, CollectionFile, FileStatus, chunk_id

FILTERS: list[object] = [
    {"type": "eq", "key": "a", "value": 1},
    {"type": "eq", "key": "a", "value": True},
    {"type": "gte", "key": "a", "value": 1},
    {"type": "ne", "key": "b", "value": "x"},
    {
        "type": "and",
        "filters": [{"type": "in", "key": "b", "value": ["x", "y"]}, {"type": "lt", "key": "a", "value": 2}],
    },
]


def test_a_filter_finds_the_files_that_it_holds_for_however_they_change() -> None:
    """1, 1.0 and True are equal in Python: files that a filter tells apart must not be taken for alike."""
    rng = random.Random(4)
    index = CollectionIndex(2)
    files: dict[str, Attributes] = {}
    vector = np.array([1, 0], np.float32)
    for _ in range(60):
        name = f"f{rng.randrange(12)}"
        change = rng.random()
        if name not in files or change < 0.3:
            files[name] = random_attributes(rng)
            index.add_file(member(name, files[name]), [chunk(name, vector.tobytes())])
        elif change < 0.7:
            files[name] = random_attributes(rng)
            index.set_attributes(name, files[name])
        else:
            del files[name]
            index.remove_file(name)
        for name, attributes in files.items():
            assert index.has_attributes(name, attributes)
        for raw in FILTERS:
            keep = compile_filter(raw)
            found = {each.passage.file_id for each in index.search(vector, "words", 12, keep)}
            assert found == {name for name, attributes in files.items() if keep(attributes)}


def random_attributes(rng: random.Random) -> Attributes:
    attributes: Attributes = {}
    if rng.random() < 0.8:
        attributes["a"] = rng.choice([1, 1.0, True, False, 2.5, "1"])
    if rng.random() < 0.8:
        attributes["b"] = rng.choice(["x", "y", "z"])
    return attributes


def member(name: str, attributes: Attributes) -> CollectionFile:
    return CollectionFile(
        file_id=name,
        filename=f"{name}.txt",
        created_at=0,
        generation="1",
        status=FileStatus.COMPLETED,
        attributes=attributes,
        chunking=Chunking(max_tokens=256, overlap_tokens=0),
    )


def chunk(name: str, vector: bytes) -> Chunk:
    text = f"The words of {name}."
    return Chunk(id=chunk_id("m", name), title=name, text=text, vector=vector, tokens=b"", tokenizer="")
