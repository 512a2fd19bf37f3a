"""Measurements of speed, memory and accuracy: `BENCHMARKS.md` has their figures.

compare_peers: jaxllm compared with transformers, llama.cpp and OpenVINO, alternating in one run.
peer_engines: the engines of compare_peers, each in a separate process.
openvino_engine: a Llama checkpoint as a stateful OpenVINO model.
family_speed: decoding speed of each family compared with llama.cpp, at about a billion weights.
experts: decoding speed of a mixture of experts compared with a dense model of equal active size.
paths: kernels compared with XLA, by format and batch size; writes the table that selects the path.
gpu: decoding and prefill speed on a GPU.
gpu_kernels: kernels for a GPU, checked and timed one by one, and models with and without them.
long: time and memory by text length, for each kind of attention.
training: a training step compared with torch and PEFT.
first_token: the time of each stage until `jaxllm generate` shows its first token.
load_time: time and memory until the first token of a GGUF file, compared with llama.cpp.
memory: peak memory by weight format, in training, and on each device of a mesh.
family_table: numerical differences between each family and transformers, on tiny random models.
format_divergence: KL divergence of each weight format from float32, on a trained model.
compression_table: size and quality of each method of `jaxllm compress`.
qat_table: how much of the rounding loss quantization-aware training recovers.
distill_table: loss after each distillation method at equal steps.
patching: sweeps of activation patching compared with PyTorch hooks; steering in a batch.
prefix_table: time saved by training on a frozen prefix.
policy_table: recall from a long text under each cache policy.
json_schema_suite: the official JSON Schema test suite against the grammars of schemas.
grammar_speed: decoding speed with and without a grammar, and the time of masks.
speculation: drafts that are accepted under both rules, and speed with drafts in `serve`.
trees: a tree of tokens compared with chains; n-gram trees as drafts.
serve_load: throughput and latencies of servers under N clients, and what HTTP costs.
cluster_table: the table of docs/scale.md.
"""
