"""llama.cpp-style token batches. batch: decode them. plan: their validation."""
