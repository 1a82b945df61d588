"""A recorded run as a page and as a trace."""
