"""Packers that improve a layout until the lower bound, a limit by count or the time limit is reached."""
