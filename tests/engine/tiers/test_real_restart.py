"""I7 across a restart on the real model, two dtypes on one store, and the proof of what lies on disk."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.build import build_engine
from engine.engine import LLMEngine
from engine.load_progress import no_progress
from engine.protocol import Failure, PromptAccount, SamplingParams, Segment, SegmentKind, Submit
from engine.settings import EngineSettings, ModelSettings, Settings, StoreSettings, TierSettings
from tests.engine.tiers.store_process import StoreProcess

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(900)]

SCOPE = b"one tenant------"
DOCUMENT = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text("utf-8")[:2400]
PROMPTS = [
    f"<|im_start|>user\n{DOCUMENT}\n\n{question}<|im_end|>\n<|im_start|>assistant\n"
    for question in ("Which processes are there?", "What is a scope?", "Who owns the device?")
]


class RealLife:
    def __init__(self, data_dir: Path, url: str, dtype: str) -> None:
        settings = Settings(
            model=ModelSettings(dtype=dtype),
            store=StoreSettings(data_dir=data_dir, url=url),
            engine=EngineSettings(device="cpu", kv_cache_memory=256 << 20, prefill_chunk_size=256),
            tiers=TierSettings(host_memory=128 << 20, disk_size=256 << 20),
        )
        self.engine: LLMEngine = build_engine(settings, no_progress)
        self.tokenizer: Tokenizer = Tokenizer.from_str(self.engine.info().tokenizer_json.decode())
        tiers = self.engine.tiers
        assert tiers is not None
        assert tiers.disk is not None
        self.disk = tiers.disk
        deadline = time.monotonic() + 60
        while self.disk.directory is None:
            self.engine.idle()
            time.sleep(0.001)
            assert time.monotonic() < deadline

    def answer(self, prompt: str) -> tuple[str, PromptAccount]:
        token_ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        segment = Segment.of(SegmentKind.QUESTION, token_ids, SCOPE)
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        self.engine.add_request(Submit(request_id="r", tenant_id="t", segments=(segment,), sampling=sampling))
        text, account = "", PromptAccount()
        while self.engine.has_work():
            for message in self.engine.step():
                assert not isinstance(message, Failure), message
                text += message.text
                account = message.account or account
        return text, account


@pytest.fixture
def data_dir(tmp_path: Path, embedded_model: Path, model_data_dir: Path) -> Path:
    """A data directory of the test's own, with the model that was converted once."""
    place = tmp_path / embedded_model.relative_to(model_data_dir)
    shutil.copytree(embedded_model, place)
    return tmp_path


def test_i7_after_a_restart_the_text_is_the_same_and_comes_from_below(data_dir: Path, store: StoreProcess) -> None:
    first = RealLife(data_dir, store.url, "float32")
    before = [first.answer(prompt)[0] for prompt in PROMPTS]
    first.engine.close(120)
    second = RealLife(data_dir, store.url, "float32")
    for prompt, text in zip(PROMPTS, before, strict=True):
        answer, account = second.answer(prompt)
        assert answer == text
        assert account.num_cached_tokens >= 0.95 * (account.num_prompt_tokens - 16)
    assert second.disk.counters.num_restored > 0
    assert second.disk.counters.num_read_errors == 0
    proof = second.engine.verify(2)
    assert proof.num_read > 0
    assert proof.num_recomputed > 0
    assert (proof.num_unreadable, proof.num_different) == (0, 0)
    second.engine.close(120)


def test_two_dtypes_on_one_store_never_read_each_others_blocks(data_dir: Path, store: StoreProcess) -> None:
    """sglang#24758, lmdeploy#4930: KV of another dtype under the same name was read."""
    first = RealLife(data_dir, store.url, "float32")
    first.answer(PROMPTS[0])
    first.engine.close(120)
    other = RealLife(data_dir, store.url, "bfloat16")
    assert other.disk.counters.num_restored == 0
    assert other.answer(PROMPTS[0])[1].num_cached_tokens == 0
    other.engine.close(120)
    again = RealLife(data_dir, store.url, "float32")
    assert again.answer(PROMPTS[0])[1].num_cached_tokens > 0
    again.engine.close(120)
