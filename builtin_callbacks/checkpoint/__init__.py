"""How a run is saved: at once or in the background, what of it is kept, and which is the best."""
