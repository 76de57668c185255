"""The same engine on a GPU: device memory, copies, messages between devices."""
