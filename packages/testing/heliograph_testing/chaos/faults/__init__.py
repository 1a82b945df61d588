"""Faults, and their effects on the process, its numbers, its files and its clock."""
