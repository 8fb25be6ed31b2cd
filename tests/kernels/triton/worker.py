"""What a worker process does before it imports Triton and torch. This module must import neither."""

from __future__ import annotations

import os


def start_interpreter() -> None:
    _one_thread()
    os.environ["TRITON_INTERPRET"] = "1"


def start_compiler() -> None:
    _one_thread()
    os.environ.pop("TRITON_INTERPRET", None)


def _one_thread() -> None:
    """numpy's and torch's thread pools, each as wide as the machine, stall each other for many times the work."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
