"""The compression methods that the registry names.

rtn: round to nearest, and changes of format. calibrated: GPTQ, SparseGPT, AWQ, SmoothQuant, Wanda,
magnitude. activations: static input quantization. experts: calibration per expert. layer_loop: the
layerwise loop, and the matrices that a rule matches. low_rank: low rank. structured_pruning: fewer
heads, channels or layers.
"""
