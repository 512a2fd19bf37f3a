"""Numerical parity of two implementations: runs the same case through both, and compares the
activations.

activations: names of the activations, cases, and backends that run them. compare: error measures,
tolerances and reports. transformers_backend: the transformers backend. golden: golden test vectors.
"""
