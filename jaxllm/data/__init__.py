"""Texts as data sets.

wikitext: WikiText as it is published. chunking: rows of equal length from long texts.
"""
