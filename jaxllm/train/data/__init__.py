"""Training data: texts become examples, examples become rows.

rows: the arrays of a batch, and the `Data` protocol. examples: token ids with a loss mask, and
their split. sources: readers of files, and the loss mask of a chat. dataset: shuffled, resumable
batches of examples, which share rows.
"""
