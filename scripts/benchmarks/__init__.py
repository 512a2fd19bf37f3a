"""Measurements of speed, memory and accuracy: `BENCHMARKS.md` has their figures.

compare_peers: jaxllm beside transformers, llama.cpp and OpenVINO, in turns within one run.
peer_engines: the engines of compare_peers, each in a process of its own.
openvino_engine: a Llama checkpoint as a stateful OpenVINO model.
family_speed: decoding of each family beside llama.cpp, at the shape of a billion weights.
experts: decoding of a mixture of experts beside a dense model of as many active weights.
paths: kernels beside XLA, by format and number of rows; writes the table that decides.
gpu: decoding and prompts on a GPU.
long: time and memory against the length of a text, for each kind of attention.
training: a training step beside torch with PEFT.
first_token: where the time goes until `jaxllm generate` shows its first token.
load_time: time and memory until a GGUF file gives its first token, beside llama.cpp.
memory: peak memory by weight format, of training, and of each device of a mesh.
family_table: how far each family is from transformers, on tiny random models.
format_divergence: how far each weight format moves a trained model.
compression_table: what each method of `jaxllm compress` costs and brings.
qat_table: what quantization-aware training brings back of what rounding loses.
distill_table: what each way of distilling brings at equal steps.
prefix_table: what training on a frozen prefix saves.
policy_table: what each cache policy still remembers of a long text.
simulate_serving: the tables of docs/scale.md.
"""
