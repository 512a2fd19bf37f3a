"""Evaluation: what a model computes, and what a change to it costs.

receptive_field: which tokens influence which outputs. parity: numerical parity with another
implementation. likelihood: perplexity and related measures of a text. needle: retrieval from long
texts. These subpackages do not import each other. verify: compares a
model with transformers. bench: speed. lm_eval: the adapter of lm-evaluation-harness.
"""
