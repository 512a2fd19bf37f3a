"""Quantization-aware training (QAT): fake-quantized weights.

Training and inference round with the same function (`IntFormat.quantize`, or `to_codes` and
`from_codes` if scales are learned), and training multiplies with the `IntWeight` itself. So the
converted model has the logits of the last step, bit for bit.

weights: the fake-quantized weight and its straight-through gradients. job: conversion of
parameters, and the training as a `TrainJob`. command: `jaxllm train qat`.
"""
