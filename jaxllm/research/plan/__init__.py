"""Planning: estimates of memory, communication and time of a model on a mesh, without running it.

hardware: device specifications. memory: bytes on each device. communication: the collectives of a
step (collective: one of them, and the sizes of a step). estimate: times from peak rates, and the
largest batch and context. search: a ranking of meshes. report: plans as text.

Collectives and bytes match compiled programs (`sharding.collective_stats`); times are bounds from
data sheets.
"""
