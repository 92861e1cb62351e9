"""From traced nodes to operators: what they do, which of them belong together."""
