"""Which device an engine computes on, over a torch that says it has four."""

from __future__ import annotations

import pytest
import torch

from engine.build import rank_device
from engine.errors import ConfigError
from engine.sampler import FetchedTokens, SampledTokens
from engine.settings import EngineSettings


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were made current, in their order."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    return made


@pytest.mark.parametrize(
    ("wanted", "ranks", "rank", "expected"),
    [
        ("cuda:2", 1, 0, "cuda:2"),
        ("cuda:0", 1, 0, "cuda:0"),
        ("cuda", 1, 0, "cuda"),
        ("auto", 1, 0, "cuda"),
        ("cuda", 4, 3, "cuda:3"),
        ("auto", 4, 0, "cuda:0"),
    ],
)
def test_where_an_engine_computes_is_the_current_device(
    wanted: str, ranks: int, rank: int, expected: str, current: list[torch.device]
) -> None:
    """Triton launches on the current device, wherever the tensors are: the pointers of another are not valid there."""
    device = rank_device(EngineSettings(device=wanted, tensor_parallel_size=ranks), rank)
    assert device == torch.device(expected)
    assert current == [device]


def test_a_cpu_is_not_made_current(current: list[torch.device]) -> None:
    assert rank_device(EngineSettings(device="cpu"), 0) == torch.device("cpu")
    assert current == []


@pytest.mark.parametrize(
    ("wanted", "ranks", "reason"),
    [
        ("cuda:4", 1, r"engine\.device = 'cuda:4', but torch sees 4 CUDA devices"),
        ("cuda", 5, "torch sees 4 CUDA devices"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    wanted: str, ranks: int, reason: str, current: list[torch.device]
) -> None:
    with pytest.raises(ConfigError, match=reason):
        rank_device(EngineSettings(device=wanted, tensor_parallel_size=ranks), ranks - 1)
    assert current == []


class _Tokens:
    """A tensor on another device than the current one, as far as fetching looks at it."""

    device = torch.device("cuda:2")

    def long(self) -> _Tokens:
        return self


def test_the_end_of_a_fetch_is_marked_on_the_tokens_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event in another device's queue has come before the tokens have."""
    streams: list[object] = []

    class Event:
        def record(self, stream: object = None) -> None:
            streams.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"queue of {device}")
    monkeypatch.setattr(torch, "stack", lambda parts: torch.zeros(2, 1))
    FetchedTokens(SampledTokens(_Tokens(), _Tokens()))  # pyright: ignore[reportArgumentType]
    assert streams == ["queue of cuda:2"]
