"""What no state_dict holds: looked at when the run is saved, compared and restored when it is resumed."""
