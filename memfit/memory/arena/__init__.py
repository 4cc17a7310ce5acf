"""The arena: memory in which a step's requests have fixed addresses."""
