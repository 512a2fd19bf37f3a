"""Complete generation loops, each compiled over `jaxllm.steps`.

`generation.decoders` has a class for each: generate, beam, speculative, contrastive, ... For all:
finish: finish reasons and token budgets; capacity: capacity checks. For generate: state: the loop's
state, one step, and the loop; pipelined: the loop for a pipelined model; overflow: eviction
policies for a full cache; streaming_prefill: prefill through a small cache in models with a memory.
For speculative: prompt_lookup: drafts by prompt lookup; rejection_sampling: rejection sampling.
"""
