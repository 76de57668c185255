"""Calls that are captured in a CUDA graph."""
