"""The weight types, one file each.

`base.py` defines the base classes of weights and of formats; `wrapper.py` is the base of weights
around one other. `affine.py` and `bitpack.py`: quantization and bit packing of integers.
`formats.py` of the folder above describes the types by the names of their formats. lora: LoRA and
DoRA, which no file stores. block_weight: integers in GGUF's blocks; super_blocks: the
numbers of its K types; super_search: quantization to them.

A new type is a file here and a row in `formats.py`; with native kernels, also a `Matrix` for them.
"""
