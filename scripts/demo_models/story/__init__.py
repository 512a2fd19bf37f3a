"""Shapes of stories, and the tables of words that fill them."""
