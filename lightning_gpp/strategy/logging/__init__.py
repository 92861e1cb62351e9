"""What user code logs, and how the other ranks log the same."""
