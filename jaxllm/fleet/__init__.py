"""Many rows of a data set through one model: on this machine's processes, or over Ray.

A *group* of consecutive rows is the unit of work, and its answers are a pure function of the group,
the job and the model: the same rows in the same order, from a fresh cache, with as many threads.
So it does not matter which worker answers a group, how often, or when; the output has the same bits
with one worker as with many, and after any number of kills.

rows (what is read), tasks (what is done with them), job (what is to be done, and to which groups),
worker (a group answered, and rows that end their worker found), processes and raydata (where
workers run), journal (what is finished survives), written (the output), running (all of it). live
(requests as they come, by one thread), deployment (the same behind Ray Serve).
"""
