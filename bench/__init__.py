"""Benchmarks that anyone can run: each is `python -m bench.NAME`, prints figures, writes JSON."""
