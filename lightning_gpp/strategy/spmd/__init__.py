"""One model on all ranks: each runs every operator on its part of the tensors (HAP)."""
