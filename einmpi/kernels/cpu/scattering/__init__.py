"""Sums of values that go to computed places."""
