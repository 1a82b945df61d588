"""Our plugins in a loop of another framework: what every such bridge is made of."""
