"""Numerical parity of two implementations: runs the same case through both, and compares the
activations.

compare: the comparison. backends: backends that run a case. activations: names of the activations.
tolerance: error measures and tolerances. transformers_backend: the transformers backend.
process_zero: a backend that runs on process 0. report: text, JSON and plots. golden: golden test
vectors.
"""
