"""Retention intervals: the decisions of a plan, their incremental state, and the schedule they stand for."""
