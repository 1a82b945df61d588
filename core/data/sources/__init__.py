"""Sources of batches: how each kind of loader is read from a position on."""
