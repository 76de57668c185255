"""A lower bound on the words that any plan of a graph moves."""
