"""Plans as data: what stands in one, its stage graph, its JSON form, how people write one."""
