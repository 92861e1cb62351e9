"""Jobs of a sweep, and their picture."""
