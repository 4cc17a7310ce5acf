"""The commands of `memfit`, one file a command (or a few that belong together); `memfit.cli` puts them together."""
