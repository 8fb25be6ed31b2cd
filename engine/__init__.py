"""The model process: a synchronous, paged, prefix-caching inference engine."""

import os

# Read by OpenMP when torch loads it, so it has to stand here, before any module of the engine imports torch. By
# default its idle threads spin for milliseconds: beside another busy process on the same cores a linear layer of 36
# rows then takes 7 to 20 times as long. After 2,000 turns (a few µs) they sleep; alone, that costs nothing measurable.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# oneDNN compiles a kernel for every number of rows that it meets and keeps 1,024 of them, torch's layer above it as
# many again: with prompts of all lengths the process grew by 700 MB. 128 are 25 numbers of rows of a model's layers.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
os.environ.setdefault("LRU_CACHE_CAPACITY", "128")
