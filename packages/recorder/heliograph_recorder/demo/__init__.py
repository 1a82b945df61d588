"""The demo: a classifier of handwritten digits, killed, resumed and compared."""
