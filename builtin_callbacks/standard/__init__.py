"""Lists of plugins that many runs want."""
