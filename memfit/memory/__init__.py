"""Memory of a training step: the judge of a budget. Its verdicts need no torch."""
