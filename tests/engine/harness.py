"""An engine over the fake device, small enough to see every block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tokenizers import Tokenizer, models, pre_tokenizers

from engine.engine import LLMEngine
from engine.protocol import (
    Delta,
    EngineInfo,
    Failure,
    PromptAccount,
    SamplingParams,
    Segment,
    SegmentKind,
    Submit,
    TenantPolicy,
    pack_tokens,
)
from engine.settings import EngineSettings
from engine.tiers.tiered_cache import TieredCache
from tests.engine.fake_runner import FakeRunner

VOCAB = 256
EOS = 255
SCOPE_A = b"tenant-a--------"
SCOPE_B = b"tenant-b--------"
PUBLIC = b"public----------"


def word_tokenizer() -> Tokenizer:
    """Token i is the word "wi" and a space: text and tokens can be told from each other by eye."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i} ": i for i in range(VOCAB)}, unk_token="w0 "))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def engine_info(num_blocks: int, block_size: int, max_model_len: int) -> EngineInfo:
    return EngineInfo(
        protocol_version=1,
        incarnation="test",
        model="fake",
        created=0,
        fingerprint="00" * 16,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        block_bytes=1024,
        eos_token_ids=(EOS,),
        vocab_size=VOCAB,
        dtype="none",
        device="none",
        tokenizer_json=word_tokenizer().to_str().encode(),
        chat_template="",
        special_tokens={},
    )


class Harness:
    """Submits token lists, steps, collects what each request got. Poisons every free block after every step."""

    runs_ahead = False  # the device: see `FakeRunner`; tests run over both

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        token_budget: int = 32,
        chunk: int = 16,
        caching: bool = True,
        tiers: TieredCache | None = None,
        runs_ahead: bool | None = None,
    ) -> None:
        if runs_ahead is not None:
            self.runs_ahead = runs_ahead
        settings = EngineSettings(
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(token_budget, chunk + max_num_seqs - 1),  # a chunk beside all decoding
            prefill_chunk_size=chunk,
            enable_prefix_caching=caching,
        )
        # It never draws EOS.
        self.runner = FakeRunner(num_blocks, block_size, VOCAB - 1, runs_ahead=self.runs_ahead)
        self.engine = LLMEngine(engine_info(num_blocks, block_size, num_blocks * block_size), settings, self.runner)
        if tiers is not None:
            self.runner.host = tiers.host_slab
            self.engine.attach_tiers(tiers)
        self.texts: dict[str, str] = {}
        self.accounts: dict[str, PromptAccount] = {}
        self.orders: dict[str, tuple[int, ...] | None] = {}
        self.finished: dict[str, str] = {}
        self.failures: dict[str, Failure] = {}
        self._names = 0

    @property
    def manager(self):
        return self.engine.scheduler.manager

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        scope: bytes = SCOPE_A,
        *,
        public: int = 0,
        use_cache: bool = True,
        counted: bool = True,
        name: str = "",
        tenant: str = "t",
        policy: TenantPolicy | None = None,
        priority: int = 0,
        when_idle: bool = False,
        document: str | None = None,
        pinned: bool = False,
        sibling_of: str = "",
        seed: int | None = None,
        document_order: Literal["given", "cache"] = "given",
    ) -> str:
        """The first `public` tokens are in the public scope (and the public's), the rest in `scope`.

        With `document` that rest is a document of the tenant.
        """
        self._names += 1
        name = name or f"r{self._names}"
        parts = [(prompt[:public], PUBLIC, SegmentKind.SYSTEM), (prompt[public:], scope, SegmentKind.QUESTION)]
        segments = tuple(
            Segment(kind, pack_tokens(part), who, owner="public")
            if who == PUBLIC
            else Segment(kind, pack_tokens(part), who, document, pinned=pinned)
            for part, who, kind in parts
            if part
        )
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if seed is None else 1.0,
            seed=seed,
        )
        self.engine.add_request(
            Submit(
                request_id=name,
                tenant_id=tenant,
                segments=segments,
                sampling=sampling,
                policy=policy or TenantPolicy(),
                priority=priority,
                when_idle=when_idle,
                use_cache=use_cache,
                sibling_of=sibling_of,
                document_order=document_order,
                counted=counted,
            )
        )
        return name

    def step(self) -> list[Delta | Failure]:
        messages = self.engine.step()
        for message in messages:
            if isinstance(message, Failure):
                self.failures[message.request_id] = message
                continue
            self.texts[message.request_id] = self.texts.get(message.request_id, "") + message.text
            if message.account is not None:
                assert message.request_id not in self.accounts, "an account came twice"
                self.accounts[message.request_id] = message.account
                self.orders[message.request_id] = message.document_order
            if message.finish_reason is not None:
                self.finished[message.request_id] = message.finish_reason
        self.runner.poison(self.manager.pool.free_list)
        return messages

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: no progress")

    def generate(
        self, prompt: Sequence[int], max_tokens: int = 4, scope: bytes = SCOPE_A, **options: object
    ) -> list[int]:
        """One request alone, to its end."""
        name = self.submit(prompt, max_tokens, scope, **options)  # type: ignore[arg-type]
        self.run()
        return self.tokens_of(name)

    def tokens_of(self, name: str) -> list[int]:
        return [int(word[1:]) for word in self.texts[name].split()]

    def check(self) -> None:
        self.manager.check_integrity(self.engine.scheduler.running)
        assert self.engine.stats().num_integrity_failures == 0
