"""Weights: their types, products, precision and files.

linear: products with a weight of any type. experts: products with one matrix each of a stack.
types/: the weight types. formats: their names. paths: parameters by dotted path, and ordered rules.
model: the interface of a model. precision: formats by path. quantize: quantize and dequantize
parameters. lazy: tensors that are read when needed. lazy_gather: weights that are gathered when
needed. safetensors: safetensors, written as a stream. load: loads a parameter from a file, block by
block. replica_check: checks that several processes have the same weights.
"""
