"""Plugins as packages: a new one from a template, the installed ones and their health."""
