"""From a rule file, or from Python objects, to checked rules."""
