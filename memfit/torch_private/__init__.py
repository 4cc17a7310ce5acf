"""All private names of torch that memfit uses; tests/test_torch_private.py has a test for each.

memfit runs on torch 2.11 to the newest. If a release moves one of these names, only a file of this
room and its test fail.
"""
