"""Messages between stages: one contract, over threads, shared memory and process groups."""
