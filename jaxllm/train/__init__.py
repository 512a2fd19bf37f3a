"""Training: a loss is a pure function around the forward pass that generates, and a step is one
compiled program over it.

trained: what is trained, apart from the rest. losses, objective: what is made small. optimizer:
rates, clipping, decay. step: the compiled step. data: what a model is trained on, as rows of
tokens. Inference never imports any of it.
"""
