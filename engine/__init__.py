"""The model process: a synchronous, paged, prefix-caching inference engine."""

import os

# Read by OpenMP when torch loads it, so it has to stand here, before any module of the engine imports torch. By
# default its idle threads spin for milliseconds: beside another busy process on the same cores a linear layer of 36
# rows then takes 7 to 20 times as long. After 2,000 turns (a few µs) they sleep; alone, that costs nothing measurable.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
