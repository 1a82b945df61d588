"""Engines: the hardware half of a run, from one CPU to several machines."""
