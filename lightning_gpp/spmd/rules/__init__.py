"""The theory: which placements of an operator's inputs give which placements of its outputs."""
