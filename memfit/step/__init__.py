"""Planned steps: prepared, run, verified and measured."""
