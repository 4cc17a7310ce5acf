"""Baselines: the ways to save memory that PyTorch offers without memfit, as rows of `memfit compare`."""
