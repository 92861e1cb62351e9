"""Sums of gradients over replicas, started while the backward goes on."""
