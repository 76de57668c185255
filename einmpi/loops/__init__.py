"""Loops: a program that runs step after step, with tensors that stay on the ranks."""
