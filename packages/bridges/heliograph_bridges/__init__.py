"""Other frameworks' callbacks here, and our plugins in their loops."""
