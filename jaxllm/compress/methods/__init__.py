"""The compression methods that the registry names.

formats: round to nearest, and changes of format. calibrated: GPTQ, SparseGPT, AWQ, SmoothQuant,
Wanda, magnitude. activations: static input quantization. experts: calibration per expert. walk: the
layerwise loop, and the matrices that a rule matches. factoring: low rank. smaller: fewer heads,
channels or layers.
"""
