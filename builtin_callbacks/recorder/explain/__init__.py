"""Tell what happened in a recorded run: in words, on a page, as a trace."""
