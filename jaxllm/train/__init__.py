"""Training: losses are pure functions around the forward pass that generates.

data: what a model is trained on, as rows of tokens.
"""
