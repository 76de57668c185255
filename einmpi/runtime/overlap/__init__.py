"""Transfers that go on while the rank computes."""
