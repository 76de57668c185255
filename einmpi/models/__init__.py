"""Builders that emit programs."""
