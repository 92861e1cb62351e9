"""Records steps and compares them with their predictions."""
