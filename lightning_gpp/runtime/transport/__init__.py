"""Messages between stages: one contract, over shared memory and process groups."""
