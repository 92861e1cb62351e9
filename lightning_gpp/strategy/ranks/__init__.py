"""Communication between ranks besides tensors: control, messages, failures, the end."""
