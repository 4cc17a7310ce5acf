"""Kernels: a captured graph and its plan, as code that runs."""
