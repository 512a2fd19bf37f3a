"""Planning: estimates of memory, communication and time of a model on a mesh, without running it.

hardware: device specifications. sizes: bytes on each device. traffic: the collectives of a step
(collective: one kind; split_texts: those of context parallelism). estimate: times from peak rates,
and the largest batch and context. propose: a ranking of meshes. simulate: many requests on many
replicas. opening: a checkpoint or a bare configuration; report: plans as text.

Collectives and bytes match compiled programs (`mesh.counts`); times are bounds from data sheets.
"""
