"""Training data: an order that is a pure function of the seed and the epoch, and loading that draws by position."""
