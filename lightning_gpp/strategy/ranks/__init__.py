"""What ranks tell each other beside tensors: control, messages, failures, the end."""
