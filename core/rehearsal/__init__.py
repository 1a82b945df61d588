"""Before a long run: a rehearsal of all of it, overfitting a few batches, the search for a learning rate.

All of them train for a moment, and then put everything back as it was.
"""
