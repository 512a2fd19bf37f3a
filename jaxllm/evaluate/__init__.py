"""Evaluation: what a model computes, and what a change to it costs.

parity: numerical parity with another implementation. likelihood: perplexity and related measures of
a text. These subpackages do not import each other. verify: compares a model with transformers.
invariance: equal bits in all ways to run a text. installation: the checks of `jaxllm doctor`.
bench: speed. lm_eval: the adapter of lm-evaluation-harness.
"""
