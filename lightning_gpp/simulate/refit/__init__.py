"""What recorded steps say about costs, and how far predictions were off."""
