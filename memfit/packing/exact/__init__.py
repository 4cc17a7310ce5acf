"""Proving a layout to be the lowest."""
