"""The weight types, one file each.

`leaf.py` defines the base class of a weight and the protocol of a format; `wrapped.py` is the base
of weights around one other. arrays: plain arrays. integers: with scales (`affine.py`: quantization;
`digits.py`: bit packing). fine: integers in groups of 16 (Q6_K). packed: bfloat16 in 12 bits. nf4:
4-bit NormalFloat. sparse: 2:4 and bitmaps. ordered: permuted columns (act-order). offset: a float
offset per group. static: inputs on a calibrated grid. factored: low rank. adapted: LoRA and DoRA.
On a mesh: `parted.py`: tensor parallel; `owned.py`: expert parallel; `scattered.py`: FSDP.

A new type is a file here and a row in `formats.py`; with native kernels, also a `Matrix` for them.
"""
