"""Chunked loss: the logits of a large vocabulary are computed some rows at a time, and never whole."""

HELP = (
    "Compute the logits of the model's head, and what the loss makes of them, some rows at a time, so that they are "
    "never whole. Last bits differ."
)
"""Of the option on the command line."""
