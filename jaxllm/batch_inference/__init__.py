"""Offline batch inference, in processes of this machine or on Ray.

A *group* of consecutive rows is the unit of work. Its answers are a pure function of the group, the
job and the model: the same rows in the same order, a fresh cache, the same number of threads. So it
does not matter which worker answers a group, how often, or when: the output is bit for bit the same
with any number of workers, and after any number of kills.

rows: the input. tasks: generate, score, embed, classify. job: the settings, and the division into
groups. worker: answers a group, and isolates rows that crash it. processes, ray_data: where workers
run. output: the output. runner: a whole run. server: a background server for requests; deployment:
the same behind Ray Serve.
"""
