"""What a model is trained on: texts become examples, examples become rows.

rows: the arrays of a batch, and what any source of batches is. examples: token ids that are
learned, and those that are only read. sources: the files they come from. conversations: which words
are the assistant's. parting: what is held out. packing: which examples share a row. dataset:
examples in rows, shuffled, resumable.
"""
