"""Collectives on shards of unequal sizes: of processes, and of threads of one process."""
