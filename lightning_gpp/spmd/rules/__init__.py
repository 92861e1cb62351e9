"""Rules: which placements of inputs give which placements of outputs."""
