"""Smaller models: ordered steps that each make parameters of parameters.

recipe: what a recipe says, and what a step is given. steps: the table of them. formats: the steps
that change the format of each matrix by itself. layers: those that see what a text makes of each
layer, over stream (the text layer by layer) and moments (of inputs), and what they do to a matrix:
clip, scaling, surgery (GPTQ, SparseGPT), pruning, sparsity. journal: what is finished, in files.
lowrank: two thin matrices for one; tensors: Tucker and CP of stacked ones, an experiment.
structure: heads, channels and layers cut away whole; salience, influence: which of them.
"""
