"""A batch cut into micro-batches, and what comes of them joined again."""
