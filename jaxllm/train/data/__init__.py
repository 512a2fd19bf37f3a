"""Training data: texts become examples, examples become rows.

rows: the arrays of a batch, and the `Data` protocol. examples: token ids with a loss mask.
sources: readers of files. conversations: the loss mask of a chat. split: the train/validation
split. packing: examples that share a row. dataset: shuffled, resumable batches of examples.
"""
