"""Model compression: a recipe is a list of steps, each a function from parameters to parameters.

recipe: the recipe parser, and the types that steps take and return. registry: the registry of
methods. pipeline: runs a recipe. `checkpoints.resume` saves finished work. report:
size, quality and speed after each step. plots: plots of quality against bytes.

Subpackages: data (calibration data), observers (of ranges), matrices (algorithms for one
matrix), layers (the layerwise calibration loop), structure (pruning of heads, channels and layers),
methods (the functions in the registry).
"""
