"""Planner `dqn`: the graph of rows, the rule of copies, the environment, the network, its training, and the planner."""
