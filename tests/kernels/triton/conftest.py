"""Two ways to run a kernel without a GPU: Triton's interpreter, and a compilation for a GPU that is not there.

Triton decides at import whether it interprets, so one process can do one of them, and which one must not depend on
which test ran first. Both therefore run in worker processes of their own, started when a test asks for them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import ParamSpec, TypeVar

import pytest

from tests.kernels.triton.worker import start_compiler, start_interpreter

P = ParamSpec("P")
R = TypeVar("R")


class Worker:
    """Calls functions of a module in another process; what they raise is raised here."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor

    def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return self._executor.submit(function, *args, **kwargs).result()


def _worker(initializer: Callable[[], None], processes: int) -> Iterator[Worker]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=initializer) as executor:
        yield Worker(executor)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Worker]:
    yield from _worker(start_interpreter, 1)


@pytest.fixture(scope="session")
def compiler() -> Iterator[Worker]:
    yield from _worker(start_compiler, 2)
