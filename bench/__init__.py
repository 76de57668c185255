"""Benchmarks: `python -m bench list` names them, and each is a script of its own."""
