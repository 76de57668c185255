"""Benchmarks: `python -m bench list` names them, and each is a script of its own."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
