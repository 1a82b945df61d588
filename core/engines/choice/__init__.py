"""Which engine a run gets, and which device a process."""
