"""Complete generation loops, each compiled over `jaxllm.steps`.

rounds: the loop behind generate, speculative and `batching.scheduler`; rows: its state, and the
draw of a token; microbatch: tokens of many rows in one pass; draft: what proposes tokens;
draft_pace: when to use it. beam, contrastive, guidance: other decoders. For all: finish: finish
reasons and token budgets; capacity: capacity checks; overflow: policies for a full cache.
"""
