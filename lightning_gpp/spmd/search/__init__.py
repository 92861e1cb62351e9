"""Finds the cheapest program of a theory."""
