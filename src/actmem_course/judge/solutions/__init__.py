"""Our answers.  The files in labs/ are cut from these by ``actmem_course.strip_solutions``: same names, same
docstrings, no bodies."""
