"""Where batches come from: how each kind of loader is read from a position on."""
