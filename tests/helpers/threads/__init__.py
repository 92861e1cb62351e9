"""Ranks that are threads of one process: messages, sums, collectives, and emulated devices."""
