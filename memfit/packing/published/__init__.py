"""The packers that papers published."""
