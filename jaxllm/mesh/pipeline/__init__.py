"""Pipeline parallelism: each device of the axis `stage` has some of the layers, and their caches.

places: assigns layers to stages, and runs a stage's layers of several kinds. schedule: what each
stage does at each tick, as tables. stages: the forward pass of microbatches, as the runner of a
model's blocks. stacked: parameters and caches of all stages as stacks. rounds: decoding with a
group of rows in each stage. training: a loss and its gradient by a schedule.
"""
