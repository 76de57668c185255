"""Derivatives of operations and aggregations, which their records name."""
