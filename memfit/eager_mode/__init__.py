"""Eager mode: a budget around an unchanged training loop, kept while its ops run, without a graph."""
