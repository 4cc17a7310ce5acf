"""Checkpointing: what stock `torch.utils.checkpoint` keeps and recomputes, planned from what was measured."""
