"""Planners as papers published them, one file each, and their parts.

Chen et al. 2016 and Feng and Huang 2018 recompute. vDNN, TFLMS and AutoSwap copy to the host; SuperNeurons and Capuchin
do both.
"""
