"""Text to graph: the syntax of programs, their names, and errors with positions."""
