"""Model compression: a recipe is a list of steps, each a function from parameters to parameters.

recipe: the recipe parser, and the types that steps take and return. registry: the table of
methods. pipeline: runs a recipe; `checkpoints.resume` saves finished work. calibration: calibration
data. report: size, quality and speed after each step. plots: plots of quality against bytes.

methods has one file per method. They share: layerwise: the loop over layers. weight_loop: the loop
over matrices and experts. input_stats: statistics of a linear's inputs. column_solver: the loop
over columns (GPTQ). channel_scaling: channel scales moved from activations to weights
(SmoothQuant, AWQ).
"""
