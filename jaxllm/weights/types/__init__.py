"""The weight types, one file each.

`base.py` defines the base classes of weights and of formats; `wrapper.py` is the base of weights
around one other. arrays: plain arrays. int_weight: integers with scales (`affine.py`: quantization;
`bitpack.py`: bit packing). bf16_12bit: bfloat16 in 12 bits. nf4: 4-bit NormalFloat. sparse: 2:4 and
bitmaps. act_order: permuted columns (act-order). low_rank: low rank. lora: LoRA and DoRA.

A new type is a file here and a row in `formats.py`; with native kernels, also a `Matrix` for them.
"""
