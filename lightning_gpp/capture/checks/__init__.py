"""Whether a captured graph is the module, tried without leaving traces on it."""
