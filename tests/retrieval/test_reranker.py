"""A real cross-encoder, small and with random weights, behind the embedder's socket."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from retrieval.embedder_client import EmbedderClient

pytestmark = pytest.mark.slow

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
QUERY = "where does the danube end"
TEXTS = [
    "the danube flows into the black sea",
    "the tagus meets the atlantic near lisbon",
    "vienna",
    "the river flows through vienna and through lisbon, where it ends",
]
WORDS = sorted({word for text in (QUERY, *TEXTS) for word in text.replace(",", "").split()})


def save_cross_encoder(directory: Path, num_labels: int = 1) -> Path:
    """Two layers of BERT over words; large weights, so that its logits leave 0 to 1 on both sides."""
    torch.manual_seed(3)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    config = BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.6,
    )
    config.num_labels = num_labels
    BertForSequenceClassification(config).save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(directory)
    return directory


def expected_scores(directory: Path) -> list[float]:
    """The model asked without sentence-transformers, a pair at a time: no padding, no batch."""
    model = BertForSequenceClassification.from_pretrained(directory).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    with torch.no_grad():
        logits = [float(model(**tokenizer(QUERY, text, return_tensors="pt")).logits[0, 0]) for text in TEXTS]
    assert max(logits) - min(logits) > 0.3, "scores that are all alike prove nothing"
    return [1 / (1 + float(torch.exp(torch.tensor(-logit)))) for logit in logits]


def embedder(tmp_path: Path, reranker: Path) -> tuple[str, list[str], dict[str, str]]:
    endpoint = f"ipc://{tmp_path}/e"
    command = [sys.executable, "-m", "retrieval.embedder", endpoint, "--threads", "1", "--reranker", str(reranker)]
    return endpoint, command, {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


async def test_a_real_cross_encoder_scores_every_pair_as_it_does_alone(tmp_path: Path) -> None:
    reranker = save_cross_encoder(tmp_path / "reranker")
    endpoint, command, environ = embedder(tmp_path, reranker)
    process = await asyncio.create_subprocess_exec(*command, env=environ, stderr=asyncio.subprocess.DEVNULL)
    client = EmbedderClient(endpoint)
    await client.start()
    try:
        assert (await client.wait_ready()).has_reranker
        scores = await client.rerank(QUERY, TEXTS)
        assert scores == pytest.approx(expected_scores(reranker), abs=1e-4)
        assert await client.rerank(QUERY, TEXTS[2:]) == pytest.approx(scores[2:], abs=1e-4)
    finally:
        await client.close()
        process.kill()
        await process.wait()


async def test_a_classifier_is_refused_as_a_reranker(tmp_path: Path) -> None:
    """Three labels: which of them says how relevant a text is, nobody knows."""
    _, command, environ = embedder(tmp_path, save_cross_encoder(tmp_path / "classifier", num_labels=3))
    process = await asyncio.create_subprocess_exec(*command, env=environ, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode not in (0, None)
    assert b"retrieval.reranker" in errors
    assert b"has 3 labels" in errors
