"""Checks that a captured graph computes what the module does, without changing the module."""
