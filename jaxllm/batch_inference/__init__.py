"""Offline batch inference: every row of a file is answered once, by `LM.serve` or in batches.

rows: reads the input, row by row. tasks: generate, score, embed, classify. run: runs a job, appends
each answer to a file under its row's id, and resumes from that file. ray: does the same on many
machines, and runs `jaxllm serve` behind Ray Serve.
"""
