"""Weights: their types, products, precision and files.

linear: products with a weight of any type. experts: products with one matrix each of a stack.
leaves/: the weight types. formats: their names. paths: parameters by dotted path, and ordered
rules. precision: formats by path. quantize: quantize and dequantize parameters. lazy: tensors that
are read when needed. later: weights that are gathered when needed. files: safetensors, written as a
stream. ahead: background scan for NaN. reading: loads a parameter from a file, block by block.
copies: checks that several processes have the same weights.
"""
