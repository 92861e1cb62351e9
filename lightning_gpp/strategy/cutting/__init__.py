"""Cuts a batch into micro-batches, and joins their results."""
