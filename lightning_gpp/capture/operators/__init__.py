"""From traced nodes to operators: what they do, and which belong together."""
