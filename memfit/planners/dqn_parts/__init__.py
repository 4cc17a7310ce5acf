"""Parts of planner `dqn`: the graph of rows, the rule of copies, the environment, the network and its training."""
