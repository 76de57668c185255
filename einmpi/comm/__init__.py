"""Messages between ranks: MPI, threads for tests, nodes and clocks."""
