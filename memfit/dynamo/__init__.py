"""Dynamo's graphs, planned: the backend of torch.compile."""
