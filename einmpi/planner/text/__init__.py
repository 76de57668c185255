"""A plan as text: EXPLAIN, a summary in words, the paper's relations."""
