"""The language of rules: read, checked and evaluated."""
