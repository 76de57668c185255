"""Panels of one matrix that many ranks share."""
