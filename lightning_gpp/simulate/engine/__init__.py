"""Plays a program in the order of time: from actions to numbers, and from numbers to tasks."""
