"""Asking planners, with limits of time and of memory."""
