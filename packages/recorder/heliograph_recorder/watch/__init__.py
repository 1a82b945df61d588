"""Look into runs while they train: a page on this machine, or a text screen, made from their recordings."""
