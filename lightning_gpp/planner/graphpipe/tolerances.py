"""Roundings that the search allows for, written once."""

SECONDS = 1e-9
"""Relative: times that differ by less are the same, and bounds hold up to it."""

LIMIT = 1e-12
"""Relative: a stage is fast enough up to this above a limit, which may be its own seconds."""

DEVICES = 1e-6
"""Absolute: a number of devices that is a quotient of sums is whole up to this."""
