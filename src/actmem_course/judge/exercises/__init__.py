"""The labs: a file each, with its exercises and their mistakes."""
