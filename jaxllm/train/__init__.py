"""Training: a loss is a pure function around the inference forward pass, and a training step is
one compiled program over it.

partition: partition of the parameters into trained and frozen ones. objective: what is minimized.
optimizer: learning rate, clipping, weight decay. step: the compiled step. loop: steps, evaluations,
resuming. checkpointing: training checkpoints, for any mesh. constraints: zeros that stay zero.
jobs: kinds of training. frozen_prefix: training after a frozen prefix, and prompt tuning.
moe_losses: losses of mixtures of experts. plots: a plot of the losses. data: texts as rows of
tokens.

Inference imports none of these modules.
"""
