"""Starting points of a search."""
