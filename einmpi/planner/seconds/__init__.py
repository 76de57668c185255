"""Plans in seconds: the fastest on a measured machine, of those that several searches find."""
