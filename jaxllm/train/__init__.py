"""Training: a loss is a pure function around the inference forward pass, and a training step is
one compiled program over it.

trained: partition of the parameters into trained and frozen. losses, objective: what is minimized.
optimizer: learning rate, clipping, weight decay. step: the compiled step. frozen: weights without
gradients. loop: steps, evaluations, resuming. keeping: training checkpoints; spread: their layout
on a mesh. scheduled: the pipelined loss. constraints: zeros that stay zero. jobs: kinds of
training. prefix, prompts: training after a frozen prefix, and prompt tuning. routing: losses of
mixtures of experts; upcycle: a mixture of experts from a dense model; infini: Infini-attention from
a dense model. picture: a plot of the losses. data: texts as rows of tokens. distill: distillation.
fake: quantization-aware training.

Inference imports none of these modules.
"""
