"""Packers as papers and frameworks published them."""
