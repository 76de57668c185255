"""The paper's own planner: partitionings, its three costs, its dynamic program."""
