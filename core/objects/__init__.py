"""The object graph: what a training's objects hold, captured, compared and restored by one walker."""
