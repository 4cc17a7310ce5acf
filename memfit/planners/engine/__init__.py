"""What planners `search`, `auto` and `offload` share; imports nothing that the papers published."""
