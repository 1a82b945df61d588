"""A package with a plugin, written from a template: the command `new-plugin`."""
