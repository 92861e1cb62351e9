"""A plan as a person reads it: a table of its stages, why it is as fast as it is, pictures."""
