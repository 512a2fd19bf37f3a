"""Low-rank factors instead of matrices: the weight type `rank64/int8`, and steps of recipes.

weight: the type. method: SVD, ASVD and SVD-LLM (`factor: svd` and the like).
"""
