"""How the journal of the index is. Apart from the journal, so that who only looks at it needs no client of a store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class JournalState(Enum):
    LOADING = "loading"  # the index of an earlier life is being read, or waited for
    OK = "ok"
    AWAY = "away"  # the store does not answer; what is to be written waits
    STALE = "stale"  # a newer incarnation has the index
    CLOSED = "closed"


@dataclass(slots=True, frozen=True)
class JournalStats:
    state: JournalState
    num_pending: int
    lag_seconds: float  # age of the oldest record that waits
    num_published: int
    num_failures: int
    num_resyncs: int
