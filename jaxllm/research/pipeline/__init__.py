"""Pipeline parallelism: each device of the axis `stage` has some of the layers, and their caches.

model: the model on a mesh with stages, which `sharding.make_sharded_model` finds by an entry point.
stage_layers: assigns layers to stages, and runs a stage's layers of several kinds. schedule: what
each stage does at each tick, as tables. forward: the forward pass of microbatches, as the runner of
a model's blocks. stage_params: parameters and caches of all stages as stacks. decode, decode_loop:
decoding with a group of rows in each stage. one_f_one_b: a loss and its gradient by a schedule.
objective: the loss as an objective of training.
"""
