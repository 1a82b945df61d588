"""The recording as a file: its lines, the records that they hold, reading and writing."""
