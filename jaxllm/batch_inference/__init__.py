"""Offline batch inference: every row of a file is answered once, by `LM.serve` or in batches.

rows: the input, read row by row. tasks: generate, score, embed, classify. run: a job, whose answers
are appended to a file under their ids, from which it resumes. ray: the same on many machines, and
`jaxllm serve` behind Ray Serve.
"""
