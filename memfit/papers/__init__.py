"""What papers published: planners, the network of the deep Q-network, packers. No search of memfit imports it."""
