"""That the host's own time does not get into a figure, over a device that is played."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bench.gpu_timer import timed_runs


@dataclass
class Queue:
    """A device with a queue, and the host's clock beside it; milliseconds."""

    host: float = 0.0
    device: float = 0.0  # when all that is queued will be done

    def launch(self, host: float, device: float) -> None:
        self.host += host
        self.device = max(self.device, self.host) + device


class PlayedEvent:
    def __init__(self, queue: Queue) -> None:
        self.queue, self.time = queue, 0.0

    def record(self) -> None:
        self.queue.launch(0.0, 0.0)
        self.time = self.queue.device

    def query(self) -> bool:
        return self.queue.host >= self.time

    def synchronize(self) -> None:
        self.queue.host = max(self.queue.host, self.time)

    def elapsed_time(self, end_event: object, /) -> float:
        assert isinstance(end_event, PlayedEvent)
        return end_event.time - self.time


@pytest.mark.parametrize("preparation", [0.0, 0.1, 1.3, 9.0])
def test_the_time_of_preparing_a_launch_is_not_measured(preparation: float) -> None:
    queue = Queue()
    times = timed_runs(
        lambda: queue.launch(preparation, 1.25), lambda: queue.launch(0.005, 0.3), lambda: PlayedEvent(queue), 5
    )
    assert times == pytest.approx([1.25] * 5)


def test_work_that_waits_for_the_device_is_timed_all_the_same_and_it_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    queue = Queue()

    def work() -> None:
        queue.launch(0.0, 1.0)
        queue.host = queue.device

    times = timed_runs(work, lambda: queue.launch(0.005, 0.3), lambda: PlayedEvent(queue), 3)
    assert len(times) == 3
    assert capsys.readouterr().out.count("host's own time") == 1
