"""What goes wrong: the faults, and what each does to the process, its numbers, its files and its clock."""
