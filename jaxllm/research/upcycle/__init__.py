"""Sparse upcycling: a mixture of experts from a dense model.

model: the mixture. command: `jaxllm upcycle`.
"""
