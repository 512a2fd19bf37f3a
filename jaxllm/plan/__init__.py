"""What a model takes on a mesh, before anything is run: bytes, traffic, idle time, what fits.

hardware: devices by name or by numbers. sizes: bytes on each device, by the table of shardings.
traffic: the collectives of a step, their number and bytes (collective: of one kind; split_texts: of
texts over `sequence`). estimate: what both take on a device's peaks, and the largest batch and
context. propose: the meshes of a number of devices, the best first. simulate: many requests on many
replicas. opening: a checkpoint, or its configuration alone; report: plans as text. Collectives and
bytes are those of compiled programs (`mesh.counts`); times are bounds from data sheets.
"""
