"""Simulated annealing over retention intervals."""
