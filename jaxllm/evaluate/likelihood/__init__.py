"""Likelihood of texts: perplexity, and the quality loss of a changed model.

data: loader of documents in batches, and protocols that choose which tokens are scored. score:
token log-probabilities, and the resumable loop over batches. On these build perplexity (also by
position), divergence (KL) and sensitivity (per group of weights).
"""
