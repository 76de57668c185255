"""How a compiled job is called: planned once, run many times."""
