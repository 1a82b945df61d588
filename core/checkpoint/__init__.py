"""What a resumed run needs: the state of a run, its files, and old files made new."""
