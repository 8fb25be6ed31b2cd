"""Mirrors the source: `tests/engine/test_x.py` tests `engine/x.py`."""
