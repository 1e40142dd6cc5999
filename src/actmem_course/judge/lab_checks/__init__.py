"""What each lab asks and how it is judged: a file for each, its hints beside it."""
