"""Plans as data: content, stage graph, JSON, and plans by hand."""
