"""One rank as a process: its environment, startup, signals and terminal."""
