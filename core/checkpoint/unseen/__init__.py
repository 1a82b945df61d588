"""State that no `state_dict` holds: recorded when a run is saved, compared and restored when it is resumed."""
