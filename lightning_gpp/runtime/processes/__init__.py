"""The processes of a run: their devices, groups and heartbeats."""
