"""Models with long attention: dilated (LongNet) and Infini-attention."""
