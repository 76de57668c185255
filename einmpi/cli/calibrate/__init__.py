"""`einmpi calibrate`: measure a machine so that plans are made in seconds."""
