"""What is done to one matrix, by what is known of its inputs.

surgery: GPTQ and SparseGPT. clip: how far a range is cut. pruning: magnitude and Wanda. sparsity:
which weights are to be zero. lowrank: two thin matrices for one. tensors: Tucker and CP, an
experiment.
"""
