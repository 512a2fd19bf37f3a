"""Quantization-aware training (QAT): fake-quantized weights.

Training and inference round with the same function (`IntFormat.quantize`, or `to_codes` and
`from_codes` if scales are learned), and training multiplies with the `IntWeight` itself. So the
converted model has the logits of the last step, bit for bit.

gradient: straight-through gradients. weights: the fake-quantized weight. prepare: conversion of
parameters. job: the training as a `TrainJob`.
"""
