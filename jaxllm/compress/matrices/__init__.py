"""Algorithms that compress one matrix, given statistics of its inputs.

surgery: GPTQ and SparseGPT. clip: search for clipped ranges. pruning: magnitude and Wanda.
sparsity: sparsity patterns and masks. lowrank: low-rank factorization. tensors: Tucker and CP, an
experiment.
"""
