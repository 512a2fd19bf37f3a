"""Pipelines: each device of the axis `stage` has some of a model's layers, and their caches.

places: which layers a stage has, and how it runs its own of several kinds. schedule: what each
stage does at each tick, as tables. stages: the forward pass of microbatches, as the course of a
model's blocks. stacked: what stages have side by side. rounds: decoding with a group of rows in
each stage. training: a loss and its gradient by a schedule.
"""
