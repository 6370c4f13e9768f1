"""Speeds beside those of others, in one process tree: `make bench`, or `python -m tests.benchmarks.bench_decode`."""
