"""Search: studies of trials, each trial a run."""
