"""Smaller models: ordered steps that each make parameters of parameters.

recipe: what a recipe says, and what a step is given. steps: the table of them. apply: one step
after the other. journal: what is finished, in files. report: what each step cost and brought.
picture: quality against bytes. formats: the steps that change the format of each matrix by itself.
layers: those that see what a text makes of each layer, over stream (the text layer by layer) and
moments (of inputs), and what they do to a matrix: clip, scaling, surgery (GPTQ, SparseGPT),
pruning, sparsity, lowrank (two thin matrices for one). structure: heads, channels and layers cut
away whole; salience, influence: which of them. tensors: Tucker and CP of stacked matrices, an
experiment.
"""
