"""Digests of the contents and effects of each batch, for comparing two recorded runs."""
