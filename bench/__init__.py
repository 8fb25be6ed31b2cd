"""Benchmarks: `python -m bench.NAME` prints a table and then one JSON line."""
