"""What few people need, kept out of the way of the rest: nothing outside imports this package.

token_merging: several old tokens of a cache in one slot, and `--overflow pooled`.
long_attention: LongNet and Infini-attention, and the command `jaxllm infini`.
self_extend: Self-Extend, a kind of attention that reads longer texts without training.
needle: a fact in a long text, and the command `jaxllm recall`.
plan: estimates of memory, communication and time on a mesh, and the command `jaxllm plan`.
llama_batch: batches of tokens in the style of llama.cpp's `llama_decode`.
pipeline: layers in stages, and schedules of microbatches.
sparse: weights without their zeros.
pruning: weights that become zero, and smaller models.
low_rank: factors of low rank instead of matrices.
distill: students of large models, and the command `jaxllm train distill`.
rl: reinforcement learning, and the command `jaxllm train rl`.
qat: quantization-aware training, and the command `jaxllm train qat`.
upcycle: a mixture of experts from a dense model, and the command `jaxllm upcycle`.
static_inputs: inputs of linears on calibrated grids, and how to find the grids.

They join by entry points (`runtime.plugins`), as those of another package would.
"""
