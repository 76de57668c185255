"""Numpy code as programs: a function runs once on symbols, which write down what it computes."""
