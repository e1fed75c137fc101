"""Measurements against the PyTorch originals: `python -m benchmarks.parity`, `.loading`, `.speed`."""
