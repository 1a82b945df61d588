"""A recorded run as a page and a trace."""
