"""Chains of vertices around tensors that are never whole in memory."""
