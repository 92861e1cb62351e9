"""One model on all ranks at once: each runs every operator on its part of the tensors (HAP)."""
