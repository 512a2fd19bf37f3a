"""Generation: from options to text, built on `jaxllm.steps` and independent of model internals.

options/: every option, checked, over a checkpoint's defaults. prompts: text or ids as ids.
sampling/: choosing a token. loops/: complete generation loops. batching/: continuous batching and
llama.cpp-style batches. search: searches over trees of tokens. completion: what a call needs and
returns. decoders: a class per decoding method, which returns text. serve: requests with text.
embeddings: hidden states as vectors, and log-probabilities. recompute: parts of a cache computed
again.
"""
