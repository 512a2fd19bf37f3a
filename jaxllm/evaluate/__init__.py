"""Evaluation: what a model computes, and what a change to it costs.

receptive: which tokens influence which outputs. equivalence: numerical parity with another
implementation. likelihood: perplexity and related measures of a text. recall: retrieval from long
texts. These subpackages do not import each other.
"""
