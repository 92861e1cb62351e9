"""The parts of module and optimizers that ranks hold: made whole, saved, loaded."""
