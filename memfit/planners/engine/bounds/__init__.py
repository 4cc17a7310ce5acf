"""Lower bounds that hold for every legal schedule."""
