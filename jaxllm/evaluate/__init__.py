"""How good a model is, and what a change to it costs: perplexity, divergence, sensitivity."""
