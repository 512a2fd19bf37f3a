"""Training: a loss is a pure function around the forward pass that generates, and a step is one
compiled program over it.

trained: what is trained, apart from the rest. losses, objective: what is made small. optimizer:
rates, clipping, decay. step: the compiled step. frozen: weights that it does not train. loop:
steps, measurements, an end that loses nothing. keeping: the state on disk; spread: that of a mesh
in one device's form, and back. scheduled: in stages, by an order of microbatches. constraints: what
was pruned stays so. prefix: after a text that is run once, and prompts that are trained. jobs: what
kinds of training there are. prompts: those around a prefix. routing: of mixtures of experts;
upcycle: such a mixture made from a dense model; infini: a model with a memory made from one.
picture: the losses, drawn. data: what a model is trained on, as rows of tokens. distill: a student
after a teacher. fake: weights that train as the integers that they will become.

Inference never imports any of it.
"""
