"""The optimizers of a run, and the windows of micro-batches that they step with."""
