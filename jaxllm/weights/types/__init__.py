"""The weight types, one file each.

`leaf.py` defines the base class of a weight and the protocol of a format; `wrapped.py` is the base
of weights around one other. arrays: plain arrays. int_quant: with scales (`affine.py`:
quantization; `digits.py`: bit packing). q6_k: integers in groups of 16 (Q6_K). bf16_12bit: bfloat16
in 12 bits. nf4: 4-bit NormalFloat. sparse: 2:4 and bitmaps. act_order: permuted columns
(act-order). int_offset: a float offset per group. static_quant: inputs on a calibrated grid.
low_rank: low rank. lora: LoRA and DoRA.

A new type is a file here and a row in `formats.py`; with native kernels, also a `Matrix` for them.
"""
