"""Complete generation loops, each compiled over `jaxllm.steps`.

text: finish reasons and token budgets; room: capacity checks. generate: generation and streaming;
state: the loop's state, one step, and the loop; rounds: the loop for a pipelined model; overflow:
eviction policies for a full cache; endless: prefill through a small cache in models with a memory.
speculative: speculative decoding; lookup: drafts by prompt lookup; acceptance: rejection sampling.
beam, contrastive: other searches. guidance: classifier-free guidance.
"""
