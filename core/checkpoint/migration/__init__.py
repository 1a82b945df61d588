"""Checkpoints of older schemas and of Helios, made checkpoints of today."""
