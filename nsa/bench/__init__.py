"""Benchmarks, traffic counts and the ahead-of-time compile gate: `python -m nsa.bench`."""
