"""Algorithms that compress one matrix, given statistics of its inputs.

column_solver: GPTQ and SparseGPT. weight_clipping: search for clipped ranges. pruning: magnitude
and Wanda. sparsity: sparsity patterns and masks. low_rank: low-rank factorization.
"""
