"""The soak: random programs against numpy, damaged files, and faults, for as long as one likes."""
