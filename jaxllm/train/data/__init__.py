"""What a model is trained on: texts become examples, examples become rows.

rows: the arrays of a batch, and what any source of batches is. examples: token ids that are
learned, and those that are only read. dataset: examples in rows, shuffled, resumable. packing:
which examples share a row.
"""
