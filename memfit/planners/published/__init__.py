"""Planners as papers published them: Chen et al. 2016, Feng and Huang 2018. One file a planner, and their parts."""
