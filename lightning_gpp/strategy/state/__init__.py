"""What ranks hold of the module and its optimizers, and how it is made whole, saved and told."""
