"""Planned steps on several ranks: all decide together, and a rank that fails ends all with its own message."""
