"""What runs: the loop, the trainer, tasks, engines, the consistent snapshot, storage."""
