"""Transfers that go on while kernels run: their parts, their steps, and when each begins."""
