"""What a resumed run needs: the state of a run, its files, and the conversion of those of Helios."""
