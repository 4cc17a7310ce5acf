"""The doors: they read options, build what they need, and return it."""
