"""Chunked loss: the logits of a large vocabulary are computed some rows at a time, and never whole."""
