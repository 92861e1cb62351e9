"""The step time of a plan: played, estimated, or bounded from below."""
