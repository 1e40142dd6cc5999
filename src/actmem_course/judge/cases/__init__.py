"""On what each answer is judged, and the mistakes that are edits of ours: a file for each lab."""
