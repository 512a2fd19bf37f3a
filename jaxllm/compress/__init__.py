"""Smaller models: pure transforms of parameters, by what calibration text says of their inputs.

lowrank: two thin matrices for one; tensors: Tucker and CP of stacked ones, an experiment.
"""
