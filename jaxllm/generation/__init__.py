"""Decoding algorithms, built on `jaxllm.steps` and independent of model internals.

sampling/: choosing a token. loops/: complete generation loops. batching/: continuous batching and
llama.cpp-style batches. Each package imports only from those listed before it.
"""
