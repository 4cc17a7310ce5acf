"""The `torch.compile` backend."""
