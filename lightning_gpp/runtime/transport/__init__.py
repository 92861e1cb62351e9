"""Messages between ranks: the interface, and its implementation by process groups."""
