"""What to do about an event: one plugin per file."""
