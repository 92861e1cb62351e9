"""What operators cost: seconds and bytes, measured."""
