"""Workers on a cluster that train together."""
