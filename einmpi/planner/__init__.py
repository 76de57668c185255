"""HOW to cut a graph over ranks so that the least data moves. Plans are pure data."""
