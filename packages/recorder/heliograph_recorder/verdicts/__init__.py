"""`Verdicts`: goodput and bottlenecks of a training."""
