"""Numerical parity of two implementations: runs the same case through both, and compares the
activations.

compare: the comparison. sides: backends that run a case. stages: names of the activations.
difference: error measures and tolerances. reference: the transformers backend. first: a backend
that runs on process 0. report: text, JSON and plots. vectors: golden test vectors.
"""
