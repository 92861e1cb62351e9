"""Recorded steps beside what was predicted of them: the callback for timelines."""
