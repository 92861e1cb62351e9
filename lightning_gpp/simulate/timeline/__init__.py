"""Timelines: what every rank did in a step, predicted or measured."""
