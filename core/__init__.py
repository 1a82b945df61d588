"""What runs: the loop, the trainer, tasks, engines, the consistent cut, storage."""
