"""Documents: text in, ordered passages out. Knows neither the model nor HTTP."""

import os

# Read by numpy's BLAS when it is loaded. A product of one query with some thousand rows gains nothing from more
# threads, and their pool would stand against the engine's on the same cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
