"""Ray datasets as loaders."""
