"""The cases: for each exercise the function that tests a learner's answer. There is a file for each lab."""
