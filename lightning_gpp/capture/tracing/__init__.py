"""Ways to trace a forward into a graph, and what keeps a module or a function whole in it."""
