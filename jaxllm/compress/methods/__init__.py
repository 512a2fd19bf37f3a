"""Compression methods: the math of a paper, its options, its function, and its row of the registry.

rtn, gptq, awq: quantization. smoothquant, static_activations: quantization of inputs; observers and
histograms find their ranges. magnitude, wanda, sparsegpt: pruning. low_rank: SVD, ASVD, SVD-LLM;
ranks chooses ranks. structured_pruning: fewer heads or channels; parameter_groups has their
parameters, salience their importance. layer_pruning: fewer layers. formats: changes of format.
"""
