"""Better divisions next to found ones: a local search, and small repairs of a plan."""
