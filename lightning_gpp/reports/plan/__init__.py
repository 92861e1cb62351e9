"""A plan for people: a table of its stages, explanations, a picture."""
