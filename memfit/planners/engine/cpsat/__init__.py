"""The retention problem as an integer program for CP-SAT."""
