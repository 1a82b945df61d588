"""What rules read."""
