"""``self.log`` of user code, repeated on the other ranks."""
