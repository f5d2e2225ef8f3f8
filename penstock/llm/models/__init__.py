"""Families of language models, one file each, and the decoder that all of them are."""
