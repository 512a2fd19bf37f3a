"""CUDA kernels for decoding: products of a few rows with weights of any format."""
