"""Collectives on shards of unequal sizes."""
