"""Likelihood of texts: perplexity, and the quality loss of a changed model.

data: loader of documents in batches. windows: protocols that choose which tokens are scored. score:
token log-probabilities. run: resumable evaluation loop. On these build perplexity, positions
(loss by position), divergence (KL), sensitivity (per group of weights) and continuations (for
lm-evaluation-harness).
"""
