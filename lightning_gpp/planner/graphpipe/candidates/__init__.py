"""Found stages on devices, and what their step takes at least."""
