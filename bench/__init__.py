"""Benchmarks: `python -m bench train`, decode, eval, prepare, load, memory, gpu."""
